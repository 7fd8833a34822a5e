"""A rank as an object in a process that Ray started: the other end of `RayRanks`."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Generator
from functools import partial
from itertools import count
from time import perf_counter
from typing import NamedTuple

from agentrl.errors import AgentRLError
from agentrl.processes.interfaces import use_interface_to
from agentrl.records.clock import now
from agentrl.runtime.files import compiler_caches
from agentrl.trainer.launch.calls import BEGIN, RankCalls, Reply
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.rank_snapshot import Refused, SnapshotFacts
from agentrl.trainer.launch.shared_buffers import Bytes, Filled, bucket_of
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.shared import IDLE_BYTES
from agentrl.weights.snapshot import LocalSnapshot, parts_of


class SentBucket(NamedTuple):
    """A bucket on its way. bytes_B: uint8; whoever sends it copies them."""

    tensors: tuple[TensorSpec, ...]
    bytes_B: Bytes


class StreamEnd(NamedTuple):
    """reply: of the method of the stream."""

    reply: Reply


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
        os.environ.update(compiler_caches(os.environ))
        importlib.import_module(preloaded)
        self._calls = RankCalls(place)
        self._stream: Generator[Filled, None, object] | None = None
        self._streamed, self._began_s = "", 0.0
        self._end = StreamEnd(Reply(None, self._streamed, self._began_s, now()))
        self._sent: Filled | None = None
        self._snapshots: dict[int, _Kept] = {}
        self._numbers = count()

    def begin(self, plan: bytes) -> Reply:
        """Build the worker of a pickled plan."""
        began_s = perf_counter()
        loaded: RankPlan = pickle.loads(plan)
        self._calls.begin(loaded)
        return Reply(None, BEGIN, began_s, now())

    def call(self, method: str, *args: object) -> Reply:
        """Call a method of the worker; a stream of it runs to its end, and its buckets go nowhere."""
        began_s = perf_counter()
        value = self._calls.call(method, *args)
        if not isinstance(value, Generator):
            return Reply(value, method, began_s, now())
        self._stream, self._streamed, self._began_s = value, method, began_s
        return self._drained()

    def begin_stream(self, method: str, *args: object) -> None:
        """Begin a stream of the worker."""
        self._streamed, self._began_s = method, perf_counter()
        self._stream = self._begun(method, args)

    def next_bucket(self) -> SentBucket | StreamEnd:
        """The next bucket of the stream, or its end, however often that is asked for."""
        self._give_back()
        if self._stream is None:
            return self._end
        try:
            self._sent = next(self._stream)
        except StopIteration as end:
            self._stream = None
            self._end = StreamEnd(Reply(end.value, self._streamed, self._began_s, now()))
            return self._end
        bucket = bucket_of(self._sent)
        return SentBucket(bucket.tensors, bucket.data)

    def end_stream(self) -> None:
        """Run the stream to its end, without its buckets."""
        self._drained()

    def keep_stream(self, method: str, *args: object) -> Reply:
        """Run a stream of the worker to its end, and keep its buckets here until they are freed."""
        began_s = perf_counter()
        number, filled = next(self._numbers), list[Filled]()
        snapshot = LocalSnapshot.of_stream(_kept(self._begun(method, args), filled))
        self._snapshots[number] = _Kept(snapshot, filled)
        facts = SnapshotFacts(number, parts_of(snapshot.content), snapshot.checksum, snapshot.not_finite)
        return Reply(facts, method, began_s, now())

    def run_work(self, number: int, work: bytes) -> Reply:
        """Call a pickled function with the buckets of a snapshot; an error of it is `Refused`."""
        began_s, function = perf_counter(), pickle.loads(work)
        value: object
        try:
            value = function(self._snapshots[number].snapshot.content)
        except AgentRLError as error:
            value = Refused(error)
        return Reply(value, _name_of(function), began_s, now())

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

    def _drained(self) -> Reply:
        while not isinstance(bucket := self.next_bucket(), StreamEnd):
            pass
        return bucket.reply

    def _begun(self, method: str, args: tuple[object, ...]) -> Generator[Filled, None, object]:
        stream = self._calls.call(method, *args)
        assert isinstance(stream, Generator), f"{method} gives buckets"
        return stream

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


def _name_of(work: Callable[..., object]) -> str:
    """The name of a function, or of that of a partial."""
    return str(getattr(work.func if isinstance(work, partial) else work, "__name__", "work"))
