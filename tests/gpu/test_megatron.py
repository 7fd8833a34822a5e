"""Megatron over NCCL: the same equality with transformers, the same going on, the same end of a rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm

import agentrl
from agentrl.config import read_toml
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.errors import TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer.attention import fastest
from agentrl.trainer.megatron.config import MegatronConfig
from tests.flow.runs import metrics_of
from tests.flow.test_megatron import HOP_SEARCH
from tests.gpu.test_sglang import GIVEN, MEAN, ON_GPU
from tests.trainer.megatron.equality import oracle, part_of, put_together
from tests.trainer.megatron.launching import END_S, alive
from tests.trainer.megatron.models import CONFIGS, MIXTURES, model_of
from tests.trainer.megatron.test_equality import PAIRS, check, expect_near
from tests.trainer.megatron.test_megatron_trainer import Breaks, trainer_on
from tests.trainer.megatron.test_state import learn, published
from tests.trainer.megatron.together import Ranks
from tests.trainer.test_kernels import KINDS, drawn
from tests.trainer.test_kernels import check as check_attention
from tests.trainer.tiny import batch

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-4
"""Kernels sum in another order; TF32 is off unless somebody switched it on."""
NUM_GPUS = torch.cuda.device_count()
# Two ranks never share a GPU: NCCL refuses it.
ON_TWO_GPUS = [*PAIRS] if NUM_GPUS > 1 else []
COUNTS = [1, 2] if NUM_GPUS > 1 else [1]


class BreaksOn(Breaks):
    """A loss that fails on one rank; the others go on, and wait for it."""

    def __init__(self, rank: int):
        self.rank, self.inner = rank, PolicyLoss()

    def __call__(self, outputs, inputs):
        if dist.get_rank() == self.rank:
            super().__call__(outputs, inputs)
        return self.inner(outputs, inputs)


@pytest.fixture(scope="module")
def one():
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fastest_attention_is_each_sequence_by_itself(dtype, kind):
    scores = KINDS[kind]
    has_sinks = scores.sinks is not None
    if has_sinks:
        scores = scores._replace(sinks=scores.sinks.cuda())
    kernel = fastest(torch.device("cuda"), dtype, has_sinks=has_sinks)
    print(kernel.name)
    check_attention(kernel.attend, drawn(dtype, "cuda"), scores, tolerance=2e-2)


def refuses_fp32() -> str | None:
    """Why torch's grouped products, as experts have them, do not take fp32 on this card; None = they do."""
    rows, matrices = torch.ones(8, 16, device="cuda"), torch.ones(2, 16, 8, device="cuda")
    try:
        grouped_mm(rows, matrices, offs=torch.tensor([4, 8], dtype=torch.int32, device="cuda"))
    except (RuntimeError, ValueError) as error:
        return f"torch {torch.__version__}: {str(error).splitlines()[0]}"
    return None


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_gpu_is_transformers(one, kind):
    if kind in MIXTURES and (why := refuses_fp32()):
        # Those of a card are in bfloat16 then, as below.
        assert "dtype" in why.lower() or "bf" in why.lower()
        return
    check(one, kind, tolerance=TOLERANCE)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_a_mixture_in_bf16_on_a_gpu_is_near_transformers(one, kind):
    layout = MegatronConfig(use_distributed_optimizer=False)
    parts = one.run(part_of, layout, kind, True, "replayed")
    expect_near(put_together(kind, layout, parts), oracle(kind, replays=True))


@pytest.mark.parametrize("on_two_gpus", ON_TWO_GPUS)
def test_two_gpus_are_transformers(two, on_two_gpus):
    check(two, "qwen3", tolerance=TOLERANCE, **PAIRS[on_two_gpus])


@pytest.mark.parametrize("count", COUNTS)
async def test_in_bf16_networks_that_rest_go_on_bit_for_bit_and_an_engine_serves_them(tmp_path, count):
    layout = {"ranks": count, "ref": False, "critic": True, "bf16": True, "offload": True}
    state = str(tmp_path / "state")
    with trainer_on(tmp_path, **layout) as first:
        await learn(first, range(3))
        await (await first.save_state(state))
        told = await learn(first, range(3, 6))
        weights = await published(first)
    with trainer_on(tmp_path, **layout) as second:
        # It has a past of its own, which it forgets.
        await learn(second, [7])
        await second.load_state(state)
        assert await learn(second, range(3, 6)) == told
        assert await published(second) == weights
        engine = EmbeddedEngine.from_model(model_of("qwen3").to(torch.bfloat16), max_slots=1)
        # The engine compares checksums.
        await second.publish(engine.sink, version=1)
        assert engine.version == 1
        await engine.close()
    assert told[-1]["train/skipped_steps"] == 1


@pytest.mark.parametrize("count", COUNTS)
async def test_offloaded_networks_are_no_longer_on_the_card_and_train_on_as_they_were(tmp_path, count):
    results = []
    for offloads in (False, True):
        with trainer_on(tmp_path, ranks=count, ref=True, critic=True, bf16=True) as trainer:
            reports = await learn(trainer, [0])
            if offloads:
                assert await trainer.offload() > 0
                offloaded_weights = await published(trainer)
                free = await trainer.onload()
                assert free is not None
                assert free > (await trainer.onload() or 0)
            else:
                offloaded_weights = await published(trainer)
            reports += await learn(trainer, [1])
            results.append((reports, offloaded_weights, await published(trainer)))
    assert results[0] == results[1]


@pytest.mark.parametrize("count", COUNTS)
async def test_a_rank_that_fails_says_why_within_seconds(tmp_path, count):
    with trainer_on(tmp_path, loss=BreaksOn(count - 1), ref=False, ranks=count) as trainer:
        began = time.monotonic()
        with pytest.raises(TrainerError, match=rf"rank {count - 1} .*: RuntimeError: the loss has a mistake"):
            await trainer.update(batch())
        assert time.monotonic() - began < END_S
        assert not any(map(alive, trainer.ranks.pids))


def test_hop_search_is_learned_on_one_card(tmp_path):
    """With SGLang beside the trainer where one is given, else with the embedded engine."""
    sglang = {
        "engine": "sglang",
        "rollout_num_gpus_per_engine": 1,
        "sglang": {**ON_GPU, "mem_fraction_static": 0.3},
        "sglang_python": GIVEN[0] if GIVEN else None,
    }
    engine = sglang if GIVEN else {}
    result = agentrl.train(HOP_SEARCH, quiet=True, output_dir=str(tmp_path), trainer="megatron", **engine)
    assert result.reports["after RL"]["greedy"].mean > 0.98
    rows = [row for row in metrics_of(result.folder) if "train/loss" in row]
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < MEAN
    # Nobody has said so: ranks have a GPU.
    assert read_toml(result.folder / "config.toml")["trainer"]["bf16"] is True
