"""A rank as an object in a process that Ray started: the other end of `RayRanks`."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Generator
from itertools import count
from typing import NamedTuple

from agentrl.cluster.interfaces import use_interface_to
from agentrl.errors import AgentRLError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.trainer.launch.calls import RankCalls
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.rank_snapshot import Refused, SnapshotFacts
from agentrl.trainer.launch.shared_buffers import Bytes, Filled, bucket_of
from agentrl.weights.shared import IDLE_BYTES
from agentrl.weights.snapshot import LocalSnapshot, parts_of


class SentBucket(NamedTuple):
    """A bucket on its way. bytes_B: uint8; whoever sends it copies them."""

    tensors: tuple[TensorSpec, ...]
    bytes_B: Bytes


class StreamEnd(NamedTuple):
    """What the method of the stream returned."""

    returned: object


class _Kept(NamedTuple):
    """A snapshot, and its memory."""

    snapshot: LocalSnapshot
    filled: list[Filled]


class RemoteRank:
    """The object. preloaded: the module with the worker. A stream gives one bucket a call.

    Calls of snapshots may come from other threads, while the worker has a call: they only read.
    """

    def __init__(self, place: RankPlace, preloaded: str) -> None:
        if place.rendezvous is not None:
            use_interface_to(place.rendezvous.host)
        importlib.import_module(preloaded)
        self._calls = RankCalls(place)
        self._stream: Generator[Filled, None, object] | None = None
        self._end = StreamEnd(None)
        self._sent: Filled | None = None
        self._snapshots: dict[int, _Kept] = {}
        self._numbers = count()

    def begin(self, plan: bytes) -> None:
        """Build the worker of a pickled plan."""
        loaded: RankPlan = pickle.loads(plan)
        self._calls.begin(loaded)

    def call(self, method: str, *args: object) -> object:
        """Call a method of the worker; a stream of it runs to its end, and its buckets go nowhere."""
        reply = self._calls.call(method, *args)
        if not isinstance(reply, Generator):
            return reply
        self._stream = reply
        return self.end_stream()

    def begin_stream(self, method: str, *args: object) -> None:
        """Begin a stream of the worker."""
        stream = self._calls.call(method, *args)
        assert isinstance(stream, Generator), f"{method} gives buckets"
        self._stream = stream

    def next_bucket(self) -> SentBucket | StreamEnd:
        """The next bucket of the stream, or its end, however often that is asked for."""
        self._give_back()
        if self._stream is None:
            return self._end
        try:
            self._sent = next(self._stream)
        except StopIteration as end:
            self._stream, self._end = None, StreamEnd(end.value)
            return self._end
        bucket = bucket_of(self._sent)
        return SentBucket(bucket.tensors, bucket.data)

    def end_stream(self) -> object:
        """Run the stream to its end, without its buckets; what its method returned."""
        while not isinstance(bucket := self.next_bucket(), StreamEnd):
            pass
        return bucket.returned

    def keep_stream(self, method: str, *args: object) -> SnapshotFacts:
        """Run a stream of the worker to its end, and keep its buckets here until they are freed."""
        stream = self._calls.call(method, *args)
        assert isinstance(stream, Generator), f"{method} gives buckets"
        number, filled = next(self._numbers), list[Filled]()
        snapshot = LocalSnapshot.of_stream(_kept(stream, filled))
        self._snapshots[number] = _Kept(snapshot, filled)
        return SnapshotFacts(number, parts_of(snapshot.content), snapshot.checksum, snapshot.not_finite)

    def run_work(self, number: int, work: bytes) -> object:
        """Call a pickled function with the buckets of a snapshot; an error of it is `Refused`."""
        try:
            return pickle.loads(work)(self._snapshots[number].snapshot.content)
        except AgentRLError as error:
            return Refused(error)

    def bytes_of(self, number: int, bucket: int) -> Bytes:
        """The bytes of a bucket of a snapshot."""
        return self._snapshots[number].snapshot.content[bucket].data

    def free_snapshot(self, number: int) -> None:
        """Free a snapshot: its memory is filled again."""
        snapshot, filled = self._snapshots.pop(number)
        snapshot.free()
        for pool, buffer in ((each.pool, each.buffer) for each in filled):
            pool.give_back(buffer, idle_bytes=IDLE_BYTES)

    def close(self) -> None:
        """Close the worker."""
        self._calls.close()

    def _give_back(self) -> None:
        """Free the last bucket's buffer: its bytes were copied when it was sent."""
        if self._sent is not None:
            self._sent.pool.give_back(self._sent.buffer)
            self._sent = None


def _kept(stream: Generator[Filled, None, object], kept: list[Filled]) -> Generator[Bucket, None, object]:
    """The buckets of a stream, of which none is filled again; returns what the stream returns."""
    while True:
        try:
            kept.append(next(stream))
        except StopIteration as end:
            returned: object = end.value
            return returned
        yield bucket_of(kept[-1])
