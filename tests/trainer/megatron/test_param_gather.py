"""Weights that ranks share are gathered layer by layer in the next pass, and before others read them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from unittest import mock

import pytest
import torch

from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.types.seams import Bucket
from agentrl.weights.codec import size_of, unpack
from tests.engine.devices import of_device
from tests.trainer.megatron.ahead import save_with
from tests.trainer.megatron.models import model_of
from tests.trainer.tiny import batch, settings

PP = {"pipeline_model_parallel_size": 2}
HERE = "tests.trainer.megatron.test_param_gather"
NOTHING: Mapping[str, object] = {}
seen_by_hooks: list[str] = []


def digest_of(named) -> str:
    """Of names, and of the bits of tensors."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def note(role, stages):
    """A function of the user that reads the weights."""
    seen_by_hooks.append(role + digest_of(pair for stage in stages for pair in stage.named_parameters()))


def streamed(worker, _folder):
    tensors = []
    for filled in worker.weights(worker.manifest(), 8_000):
        bytes_B = filled.buffer.bytes_B[: sum(map(size_of, filled.tensors))]
        tensors += unpack(Bucket(filled.tensors, bytes_B.numpy()))
        filled.pool.give_back(filled.buffer)
    return digest_of(tensors)


def on_device(worker, _folder):
    with mock.patch("agentrl.trainer.megatron.gather.allocated", of_device):
        facts = worker.weights_on_device(worker.manifest(), 8_000)
    if facts is None:
        return []
    worker.free_weights([facts.number])
    return [part.content_hash for part in facts.weights.parts]


def saved(worker, folder):
    worker.save(folder)
    while not worker.is_written():
        time.sleep(0.01)
    torch.distributed.barrier()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path.relative_to(folder)), path.read_bytes()) for path in files]


def scored(worker, _folder):
    by_sample = worker.score(batch().samples, "old")[0]
    return [(number, array.tobytes()) for number, array in sorted(by_sample.items())]


def moved(worker, _folder):
    worker.move_reference(0.5)
    (stage,) = worker._passes["ref"].network.stages
    return digest_of(stage.named_parameters())


def offloaded(worker, folder):
    worker.offload()
    worker.onload()
    return streamed(worker, folder)


def nothing(_worker, _folder):
    """The next step is the first that reads."""


READERS = (streamed, on_device, saved, scored, moved, offloaded)


def trained(layout, rank, model, folder, changes, readers):
    """Runs in a rank: what each of them reads first after an update; the share of weights that were not
    gathered by then; what a function of the user has read."""
    from agentrl.trainer.megatron.passes import gathered_groups
    from agentrl.trainer.megatron.worker import MegatronWorker

    seen_by_hooks.clear()
    learning = Learning(PolicyLoss(), settings(lr=1e-2, **changes), 20)
    models = {"old": str(model)} | ({"ref": str(model)} if moved in readers else {})
    worker = MegatronWorker(
        MegatronPlan(layout=layout, policy=learning, models=models, moves_reference=moved in readers)
    )
    read, waiting = [], []
    for number, reader in enumerate(readers):
        steps = worker.update(batch(number))["old"]
        groups = gathered_groups(worker._passes["old"].stages)
        waiting.append([not group.param_gather_dispatched for group in groups])
        read.append((steps.step["grad_norm"], reader(worker, folder)))
    return read, waiting, list(seen_by_hooks)


def with_and_without(ranks, tmp_path, kind, *, sizes=NOTHING, changes=NOTHING, readers=READERS):
    """The same steps twice: with gathers in the passes, and with one after each step."""
    if "enable_mtp_training" in changes:
        model = save_with(tmp_path / "model", kind)
    else:
        model_of(kind).save_pretrained(tmp_path / "model")
        model = tmp_path / "model"
    results = []
    for overlaps in (True, False):
        layout = MegatronConfig(
            actor_num_gpus_per_node=ranks.count,
            # Each parameter is gathered by itself: none arrives because another one has to.
            megatron_config={"overlap_param_gather": overlaps, "bucket_size": 1},
            **sizes,
        )
        results.append(ranks.run(trained, layout, model, tmp_path / str(overlaps), changes, readers))
    return zip(*results, strict=True)


def expect_same(ranks, tmp_path, kind, **how):
    for ours, theirs in with_and_without(ranks, tmp_path, kind, **how):
        (read, waiting, seen), (expected, eager, seen_eagerly) = ours, theirs
        assert len(read) == len(expected)
        for number, (found, right) in enumerate(zip(read, expected, strict=True)):
            assert found == right, number
        assert seen == seen_eagerly
        assert not any(map(any, eager))
        if not seen:
            assert all(map(all, waiting)), "an update leaves them to whoever reads next"
            assert all(waiting)


def test_whoever_reads_first_after_a_step_finds_all_of_it(pair, tmp_path):
    expect_same(pair, tmp_path, "qwen3")


@pytest.mark.parametrize(
    ("kind", "sizes", "changes"),
    [
        ("qwen3_moe", {}, {}),
        ("qwen3_next", {}, {}),
        ("gpt_oss", {}, {}),
        ("mimo", {"offload": True}, {"enable_mtp_training": True}),
        ("qwen3, tied", {}, {"bf16": True}),
        ("qwen3, tied", {"offload": True}, {"bf16": True}),
        ("qwen2", {}, {"bf16": True, "optimizer_cpu_offload": True}),
        ("qwen3", {}, {"optimizer": "muon"}),
        ("llama", {"context_parallel_size": 2}, {}),
        ("qwen2_moe", {"recompute_granularity": "full"}, {}),
    ],
)
def test_passes_read_weights_that_have_arrived(pair, tmp_path, kind, sizes, changes):
    expect_same(
        pair, tmp_path, kind, sizes=sizes, changes=changes, readers=(scored, nothing, nothing, streamed)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sizes", "changes"),
    [
        ("qwen3, tied", PP, {}),
        ("mimo", PP, {"enable_mtp_training": True}),
        ("qwen3", {**PP, "num_virtual_stages_per_pipeline_rank": 2}, {}),
        ("qwen3_moe", {"expert_model_parallel_size": 2}, {}),
        ("deepseek_v3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    ],
)
def test_four_ranks_do(four, tmp_path, kind, sizes, changes):
    readers = scored, nothing, on_device, streamed
    expect_same(four, tmp_path, kind, sizes=sizes, changes=changes, readers=readers)


@pytest.mark.parametrize("when", ["before_train_step", "after_train_step", "before_log_prob", "before_save"])
def test_a_function_of_the_user_finds_all_of_it(pair, tmp_path, when):
    hook = {f"custom_megatron_{when}_hook_path": f"{HERE}:note"}
    expect_same(pair, tmp_path, "qwen3", sizes=hook, readers=(nothing, scored, saved))
