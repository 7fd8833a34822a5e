"""Every engine serves what any layout trains; and whatever breaks on the way, the old version serves."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.errors import EngineError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.types import RolloutId, Sample
from agentrl.types.seams import Policy, Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, unpack
from agentrl.weights.delta import checksum_of
from tests.engine.serving import save_tiny
from tests.engine.subjects import VOCAB, text_of
from tests.engine.test_sglang_weights import KINDS, open_rig, sglang_with_loader, transport_of
from tests.trainer.megatron.launching import megatron_trainer, wait_until
from tests.trainer.megatron.models import CONFIGS, MIXTURES, SIZES, model_of
from tests.trainer.tiny import batch, settings, tokenizer

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
PAIRS = {
    "TP2+SP": {**TP, "sequence_parallel": True},
    "PP2, virtual": {**PP, "num_virtual_stages_per_pipeline_rank": 2},
    "TP2": TP,
    "PP2": PP,
    "CP2": CP,
    "DP2": {},
}
FOURS = {
    "TP2 x PP2": {**TP, **PP},
    "TP2 x CP2": {**TP, **CP},
    "PP2 x DP2": PP,
    "TP2+SP x PP2, virtual": {**PAIRS["TP2+SP"], **PAIRS["PP2, virtual"]},
}
EP = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
OF_EXPERTS = {"EP2 x PP2": {**EP, **PP}, "EP2 x TP2+SP": {**EP, **PAIRS["TP2+SP"]}}
LAYOUTS = {
    **{name: (2, of) for name, of in PAIRS.items()},
    **{name: (4, of) for name, of in (FOURS | OF_EXPERTS).items()},
}
SERVED = ("qwen3", "qwen3, tied", "qwen2", "llama", "mistral, windows", "gemma3_text", "qwen3_5_text")
BUCKET_BYTES = 8_000
PROMPT = [1, 5, 9, 3]


@contextmanager
def trainer_over(model: Path, layout: str, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[RankTrainer]:
    ranks, sizes = LAYOUTS[layout]
    plan = MegatronPlan(
        layout=MegatronConfig(actor_num_gpus_per_node=ranks, **sizes),
        policy=Learning(PolicyLoss(), settings(lr=1e-2), 6),
        models={"old": str(model)},
    )
    trainer = megatron_trainer(plan, model.parent / "ranks", bucket_bytes=bucket_bytes)
    try:
        yield trainer
    finally:
        trainer.ranks.close()


def saved(folder: Path, kind: str) -> Path:
    model_of(kind).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def engine_of(kind: str) -> EmbeddedEngine:
    return EmbeddedEngine.from_model(model_of(kind), max_slots=2, max_context_len=64)


class RecordingSink:
    """A sink that keeps the buckets as they are. seen: told of every bucket, before it is kept or let go."""

    def __init__(self, on_bucket=lambda number: None, keeps: bool = True):
        self.on_bucket, self.keeps = on_bucket, keeps
        self.number, self.buckets, self.checksum = 0, [], None

    @asynccontextmanager
    async def begin(self, manifest, version):
        self.manifest = manifest
        yield self

    async def put(self, bucket):
        self.on_bucket(self.number)
        self.number += 1
        self.buckets += [bucket] if self.keeps else []

    async def commit(self, checksum):
        self.checksum = checksum


class Between:
    """Does something to the buckets on their way into a sink."""

    def __init__(self, sink, does):
        self.sink, self.does, self.number = sink, does, 0

    @asynccontextmanager
    async def begin(self, manifest, version):
        async with self.sink.begin(manifest, version) as self.inner:
            yield self

    async def put(self, bucket):
        self.number += 1
        await self.inner.put(self.does(self.number, bucket) or bucket)

    async def commit(self, checksum):
        await self.inner.commit(checksum)


async def expect_serving(engine: Policy, trainer: RankTrainer, version: int) -> None:
    """What an engine believes of its own tokens is what the trainer believes of them."""
    completion = await engine.generate(
        PROMPT, Sampling(8, temperature=1.0, seed=version), session=f"v{version}"
    )
    assert set(completion.versions.tolist()) == {version}
    scores = await trainer.score((sample_of(completion),))
    np.testing.assert_allclose(scores.proximal[0][len(PROMPT) :], completion.logprobs, atol=2e-4)


def sample_of(completion) -> Sample:
    ids = np.concatenate([np.array(PROMPT, np.int32), completion.token_ids])
    mask = np.arange(len(ids)) >= len(PROMPT)
    return Sample(
        token_ids=ids,
        author=mask.astype(np.int8),
        loss_mask=mask,
        logprobs=np.concatenate([np.zeros(len(PROMPT), np.float32), completion.logprobs]),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.zeros(len(ids), np.int32),
        temperatures=np.ones(len(ids), np.float32),
        rollout_id=RolloutId("probe"),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "kind"),
    # Each layout of four ranks has two options of the pairs.
    [
        *((layout, "qwen2") for layout in FOURS),
        *(("TP2 x PP2", kind) for kind in CONFIGS if kind not in MIXTURES and kind != "qwen2"),
        *(("EP2 x PP2", kind) for kind in sorted(MIXTURES)),
        ("EP2 x TP2+SP", "qwen3_moe"),
    ],
)
async def test_before_the_first_step_it_is_the_checkpoint_bit_for_bit(tmp_path, layout, kind):
    sink = RecordingSink()
    with trainer_over(saved(tmp_path, kind), layout) as trainer:
        report = await trainer.publish(sink, version=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    arrived = dict(pair for bucket in sink.buckets for pair in unpack(bucket))
    expected = dict(named_weights(model))
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in expected.items())
    assert sink.checksum == checksum(expected.items())
    assert [spec for bucket in sink.buckets for spec in bucket.tensors] == list(sink.manifest)
    assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert len(sink.buckets) > 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "qwen3") for layout in FOURS),
        *(("TP2+SP", kind) for kind in SERVED),
        *(("EP2 x PP2", kind) for kind in ("qwen3_moe", "gpt_oss", "qwen3_next")),
    ],
)
async def test_version_after_version_is_served(tmp_path, layout, kind):
    engine = engine_of(kind)
    with trainer_over(saved(tmp_path, kind), layout) as trainer:
        for version in (1, 2):
            await trainer.update(batch())
            await trainer.publish(engine.sink, version=version)
            await expect_serving(engine, trainer, version)
    await engine.close()


@pytest.mark.full
async def test_what_breaks_on_the_way_leaves_the_old_version(tmp_path):
    engine = engine_of("qwen3")

    def breaks(number, bucket):
        if number == 3:
            raise EngineError("no room")

    def damages(number, bucket):
        if number == 3:
            data = bucket.data.copy()
            data[7] ^= 1
            return bucket._replace(data=data)
        return None

    with trainer_over(saved(tmp_path, "qwen3"), "TP2+SP") as trainer:
        await trainer.publish(engine.sink, version=1)
        await expect_serving(engine, trainer, 1)
        for does, message in ((breaks, "no room"), (damages, "arrived damaged")):
            with pytest.raises(EngineError, match=message):
                await trainer.publish(Between(engine.sink, does), version=2)
            # Nobody is left in the middle of it: ranks that wait for long fail.
            wait_until(lambda: all(call.is_done for _, call in trainer.ranks._watched.unread), 10.0)
            assert all(len(mapped_buffers(pid)) <= 3 for pid in trainer.ranks.pids)
            await expect_serving(engine, trainer, 1)
        await trainer.update(batch())
        await trainer.publish(engine.sink, version=3)
        await expect_serving(engine, trainer, 3)
    await engine.close()
    assert not mapped_buffers()
    assert "agentrl-bucket" not in "".join(os.readlink(path) for path in descriptors())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["PP2", pytest.param("TP2+SP", marks=pytest.mark.faults)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.faults)])
async def test_a_rank_that_is_killed_in_mid_publish_is_named(tmp_path, layout, rank):
    engine, before = engine_of("qwen3"), shared_files()

    def strikes(number, bucket):
        if number == 3:
            os.kill(trainer.ranks.pids[rank], signal.SIGKILL)

    with trainer_over(saved(tmp_path, "qwen3"), layout) as trainer:
        await trainer.publish(engine.sink, version=1)
        with pytest.raises(TrainerError, match=rf"rank {rank} .*was ended by SIGKILL"):
            await trainer.publish(Between(engine.sink, strikes), version=2)
        assert not any(Path(f"/proc/{pid}").exists() for pid in trainer.ranks.pids)
    completion = await engine.generate(PROMPT, Sampling(4), session="a")
    assert (engine.version, set(completion.versions.tolist())) == (1, {1})
    await engine.close()
    assert shared_files() <= before
    assert not mapped_buffers()


def shared_files() -> set[str]:
    """Of everybody but tests beside, which have semaphores and servers."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "sglang_"))}


def descriptors() -> list[Path]:
    # The folder's own is gone when it has been read.
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def mapped_buffers(pid: int | str = "self") -> set[str]:
    """The buckets that a process has mapped, by their inodes."""
    gc.collect()
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return set(re.findall(r"(\d+) +/memfd:agentrl-bucket", maps))


@pytest.mark.full
async def test_what_a_sink_keeps_stays_and_what_it_lets_go_is_filled_again(tmp_path):
    buffers: dict[bool, set[str]] = {True: set(), False: set()}
    # No parameter is larger, so that any room is large enough.
    with trainer_over(saved(tmp_path, "qwen3"), "TP2+SP", bucket_bytes=32_000) as trainer:
        keeping = RecordingSink(lambda number: buffers[True].update(mapped_buffers()))
        await trainer.publish(keeping, version=1)
        await trainer.update(batch())
        letting_go = RecordingSink(
            lambda number: buffers[False].update(mapped_buffers() - buffers[True]), keeps=False
        )
        await trainer.publish(letting_go, version=2)
    assert keeping.number == letting_go.number == len(buffers[True]) > 10
    # One that the driver looks at, one that is filled meanwhile.
    assert len(buffers[False]) <= 2
    assert checksum_of(keeping.buckets) == keeping.checksum != letting_go.checksum
    keeping.buckets.clear()
    assert not mapped_buffers()


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


@pytest.mark.parametrize("keeps", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize("layout", ["TP2+SP", pytest.param("PP2", marks=pytest.mark.full)])
@pytest.mark.full
async def test_no_rank_holds_more_than_some_buckets_however_slow_the_sink(tmp_path, layout, keeps):
    large = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SIZES, **large}), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    model_bytes, bucket_bytes = sum(p.nbytes for p in model.parameters()), 1 << 20
    with trainer_over(tmp_path / "model", layout, bucket_bytes=bucket_bytes) as trainer:
        before = [resident_bytes(pid) for pid in trainer.ranks.pids]
        most = [0, 0]

        def look(number):
            # Long enough to fill whatever they may.
            time.sleep(0.05)
            most[:] = map(max, most, (resident_bytes(pid) for pid in trainer.ranks.pids))

        await trainer.publish(RecordingSink(look, keeps), version=1)
    assert model_bytes > 24 * bucket_bytes
    for grown in (now - then for now, then in zip(most, before, strict=True)):
        assert grown < 8 * bucket_bytes


@pytest.fixture(scope="module")
def sglang(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("sglang")
    with sglang_with_loader(folder) as url:
        yield url, folder / "model"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["TP2+SP", "PP2"])
@pytest.mark.parametrize("transport", KINDS)
async def test_a_real_server_serves_what_any_layout_publishes(tmp_path, sglang, transport, layout):
    url, _ = sglang
    before = shared_files()
    with trainer_over(save_tiny(tmp_path / "model"), layout) as trainer:
        async with open_rig([Server(url)], transport_of(transport, tmp_path)) as rig:
            policy = SGLangPolicy(url, vocab_size=VOCAB, decode=text_of)
            for version in (1, 2):
                await trainer.update(batch())
                # The sink compares what the server has loaded with the trainer's checksum.
                await trainer.publish(rig.sink, version=version)
                # A fleet does that for its policy: no prefix of older weights is used.
                policy.salt = rig.sink.salt
                await expect_serving(policy, trainer, version)

            def breaks(number, bucket):
                if number == 3:
                    raise EngineError("no room")

            def strikes(number, bucket):
                if number == 3:
                    os.kill(trainer.ranks.pids[1], signal.SIGKILL)

            with pytest.raises(EngineError, match="no room"):
                await trainer.publish(Between(rig.sink, breaks), version=3)
            await expect_serving(policy, trainer, 2)
            await trainer.update(batch())
            with pytest.raises(TrainerError, match=r"rank 1 .*was ended by SIGKILL"):
                await trainer.publish(Between(rig.sink, strikes), version=3)
            completion = await policy.generate(PROMPT, Sampling(4), session="last")
            assert set(completion.versions.tolist()) == {2}
            assert (rig.sink.version, rig.lost) == (2, [])
            await policy.close()
    assert shared_files() <= before
