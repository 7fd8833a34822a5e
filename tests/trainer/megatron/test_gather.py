"""Ranks on one machine write into the buckets of rank 0; from elsewhere, they send."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types.seams import Bucket
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import manifest_of, size_of, unpack
from agentrl.weights.device import views_in
from agentrl.weights.shared import BufferPool, SharedBuffer
from tests.engine.devices import of_device
from tests.trainer.megatron.models import CONFIGS, checkpoint_of, model_of

PAIRS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2, uneven": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
    "DP2": {},
    "EP2": {"expert_model_parallel_size": 2},
    "ETP2": {"expert_tensor_parallel_size": 2},
    "EP2, stacked": {"expert_model_parallel_size": 2},
    "ETP2, stacked": {"expert_tensor_parallel_size": 2},
}
FOURS = {
    "TP2 x PP2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "PP2 x DP2": {"pipeline_model_parallel_size": 2},
}
BUCKET_BYTES = 8_000
NOWHERE = "/nowhere"
"""Where no rank can map anything: on GPUs all of them send."""
FILES = {"a small file": b"?" * 16, "a large file": b"?" * 1_000_000}


def gather(layout, rank, kind, elsewhere, keeps=False):
    """Inside a rank: who is far; then, of two times, whether all has arrived, and how many rooms are mapped.

    elsewhere: what the last rank finds where it looks for rank 0's rooms.
    """
    from agentrl.trainer.megatron import local_ranks
    from agentrl.trainer.megatron.gather import BucketLoads, gathered
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.shape import shape_of

    model = model_of(kind)
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    tensors_by_name = [(name, checkpoint_of(model)[name]) for name in network.shape.by_tensor()]

    results, buffers = [], []
    moved = elsewhere and (rank == layout.world_size - 1 or elsewhere == NOWHERE)
    with mock.patch.object(local_ranks._Location, "path", elsewhere) if moved else nullcontext():
        ours = local_ranks.LocalRanks(BUCKET_BYTES)
        loads = BucketLoads(network, manifest_of(tensors_by_name), BUCKET_BYTES)
        for _ in range(2):
            arrived, right = collected(gathered(loads, ours), keeps, buffers)
            results.append((rank > 0 or (right and same(arrived, tensors_by_name)), mapped_buffers()))
    return sorted(ours.far), results


class Operators(TorchDispatchMode):
    """Counts the operators of its block."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def publish_again(layout, rank, kind):
    """Inside a rank: the operators of the first and of the second publish; the tensors that came wrong."""
    from agentrl.trainer.megatron import gather
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.shape import shape_of
    from agentrl.trainer.offload import NetworkMemory

    model = model_of(kind).to(torch.bfloat16)
    network, checkpoint = Network(shape_of(model.config), layout, bf16=True), checkpoint_of(model)
    named = [(name, checkpoint[name]) for name in network.shape.by_tensor()]
    loads = gather.BucketLoads(network, manifest_of(named), 1 << 20)
    memory, wrong = NetworkMemory(lambda: (parameter for _, parameter in network.pieces())), []

    def publish(factor):
        """factor: powers of two change no bit of what is compared but those of the exponent."""
        network.load(lambda name: checkpoint[name] * factor)
        if factor == 4:
            memory.offload()
            memory.onload()
        elif factor == 8:
            replace(network)
        with mock.patch.object(gather, "allocated", of_device), Operators() as operators:
            packed = gather.packed_on_device(loads, nullcontext)
        arrived = dict(
            pair
            for part in packed.weights.parts
            for pair in views_in(part.tensors, packed.memory.bytes_B[part.start :])
        )
        wrong.extend(
            (factor, name) for name, tensor in named if not torch.equal(arrived[name], tensor * factor)
        )
        return operators.calls

    calls = [publish(factor) for factor in (1, 2, 4, 8, 16)]
    return [call.total() for call in calls], calls[1], wrong, len(loads.loads)


def replace(network):
    """Every other parameter gets memory of its own, and what it had before holds other numbers."""
    for _, parameter in list(network.pieces())[::2]:
        before = parameter.data
        parameter.data = before.clone()
        before.fill_(torch.nan)


def collected(stream, keeps, buffers):
    """Rank 0's buckets, as tensors; whether the checksum is theirs."""
    arrived, digests = {}, []
    while True:
        try:
            filled = next(stream)
        except StopIteration as end:
            return arrived, end.value == sum_digests(digests)
        bucket = Bucket(filled.tensors, filled.buffer.bytes_B[: sum(map(size_of, filled.tensors))].numpy())
        arrived |= dict(unpack(bucket))
        digests += digests_of(bucket)
        (buffers.append if keeps else filled.pool.give_back)(filled.buffer)


def same(arrived, tensors_by_name):
    return arrived.keys() == dict(tensors_by_name).keys() and all(
        torch.equal(arrived[name], t) for name, t in tensors_by_name
    )


def mapped_buffers():
    """How many rooms this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:agentrl-bucket")


def kind_for(layout):
    if "stacked" in layout:
        return "gpt_oss"
    return "qwen3_moe" if layout in ("EP2", "ETP2") else "glm4"


def layout_of(sizes, ranks):
    return MegatronConfig(actor_num_gpus_per_node=ranks, **sizes)


@pytest.fixture
def elsewhere(tmp_path, request):
    """What is where a rank on another machine looks: nothing, or what another process has open."""
    path = tmp_path / "open"
    if request.param == "a pipe":
        os.mkfifo(path)
    if request.param in FILES:
        path.write_bytes(FILES[request.param])
    yield None if request.param == "rank 0" else str(path)
    assert request.param not in FILES or path.read_bytes() == FILES[request.param]


@pytest.mark.parametrize("elsewhere", ["rank 0", "nothing", "a pipe", *FILES], indirect=True)
@pytest.mark.full
@pytest.mark.parametrize("layout", PAIRS)
def test_what_ranks_write_and_what_they_send_arrives(pair, layout, elsewhere):
    replies = pair.run(gather, layout_of(PAIRS[layout], 2), kind_for(layout), elsewhere)
    for rank, (far, results) in enumerate(replies):
        assert far == ([] if elsewhere is None else [1])
        # Those of the largest parameters are filled again and again.
        assert [right for right, _ in results] == [True, True]
        assert all(number == 0 if rank in far else 1 <= number <= 3 for _, number in results)


@pytest.mark.full
@pytest.mark.parametrize("elsewhere", ["rank 0", "nothing"], indirect=True)
@pytest.mark.parametrize("layout", FOURS)
def test_some_ranks_write_while_others_send(four, layout, elsewhere):
    for far, results in four.run(gather, layout_of(FOURS[layout], 4), "qwen2", elsewhere):
        assert far == ([] if elsewhere is None else [3])
        assert all(right for right, _ in results)


@pytest.mark.parametrize("layout", PAIRS)
def test_where_nobody_maps_anything_the_first_rank_sends_nothing_to_itself(pair, layout):
    for far, results in pair.run(gather, layout_of(PAIRS[layout], 2), kind_for(layout), NOWHERE):
        assert far == [1]
        assert [right for right, _ in results] == [True, True]


@pytest.mark.parametrize("kind", CONFIGS)
def test_later_versions_are_the_copies_of_the_first_from_where_the_parameters_are_now(single, kind):
    ((totals, second, wrong, buckets),) = single.run(publish_again, layout_of({}, 1), kind)
    assert not wrong
    first, later, offloaded, replaced, last = totals
    assert later < first / 2
    assert (offloaded, last) == (later, later)
    assert replaced > 2 * later, "other memory is noticed"
    # Runs, what lies otherwise on one side, and what stays in fp32.
    assert buckets <= second["aten::_foreach_copy_"] <= 4 * buckets
    assert second["aten::copy_"] <= buckets, "the end of each bucket, for its hash"


def test_whoever_writes_keeps_few_rooms_though_a_sink_keeps_all(pair):
    first, other = pair.run(gather, layout_of(PAIRS["TP2"], 2), "qwen3", None, True)
    assert [right for right, _ in first[1]] == [True, True]
    assert first[1][1][1] > 10
    assert [number for _, number in other[1]] == [3, 3]


def test_the_smallest_room_that_is_large_enough_is_filled_again():
    free = BufferPool(100)
    small, large = free.take(50), free.take(300)
    assert (len(small.bytes_B), len(large.bytes_B)) == (100, 300)
    for buffer in (large, small):
        free.give_back(buffer)
    assert [free.take(60), free.take(60)] == [small, large]
    assert len(free.take(60).bytes_B) == 100
    returned = [SharedBuffer(size) for size in (500, 100, 400, 200, 300)]
    for buffer in returned:
        free.give_back(buffer)
    sizes = [len(free.take(1).bytes_B) for _ in range(4)]
    assert sizes == [300, 400, 500, 100], "three are kept, and the last is new"
    for buffer in returned:
        free.give_back(buffer, idle_bytes=1400)
    sizes = [len(free.take(1).bytes_B) for _ in range(5)]
    assert sizes == [200, 300, 400, 500, 100], "as many as are no larger together"
