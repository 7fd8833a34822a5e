"""A rank of the trainer: the object that `Processes` has in a process for each rank."""

from __future__ import annotations

import importlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

from agentrl.errors import TrainerError
from agentrl.processes.interfaces import use_interface_to
from agentrl.records.clock import Moment, now
from agentrl.records.gpu_memory import held_text, is_out_of_memory
from agentrl.runtime.files import compiler_caches
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.shared_buffers import Bytes, Filled, SharedBytes, bucket_of
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.shared import IDLE_BYTES
from agentrl.weights.snapshot import LocalSnapshot, parts_of

BEGIN = "begin"
"""The call that sends a rank a new plan, among those of its worker."""
IMPORT = "import"
"""The call in which a rank imports the module with its worker."""
_REMEDY = "lower max_tokens_per_gpu or the servers' mem_fraction_static, or set recompute_granularity = full."

R = TypeVar("R")


class RankReply(NamedTuple, Generic[R]):
    """What a call of a rank returned. began_s, ended: its begin and its end, by the rank's clock."""

    value: R
    method: str
    began_s: float
    ended: Moment


class SentBucket(NamedTuple):
    """A bucket on its way. data: where it is, for a driver on this machine; for another one the bytes."""

    tensors: tuple[TensorSpec, ...]
    data: SharedBytes | Bytes


class StreamEnd(NamedTuple):
    """reply: of the method of the stream, with what its generator returned."""

    reply: RankReply[object]


class SnapshotFacts(NamedTuple):
    """A snapshot in a rank. number: by which the rank knows it. The others: see `Snapshot`."""

    number: int
    parts: tuple[tuple[TensorSpec, ...], ...]
    checksum: int
    not_finite: str | None


class _Kept(NamedTuple):
    """A snapshot, and its memory."""

    snapshot: LocalSnapshot
    filled: list[Filled]


class RankProcess:
    """The rank at a place. preloaded: the module with its worker, which takes seconds to import.

    A stream gives one bucket a call. Calls of snapshots may come from other threads, while the worker has a
    call: they only read. is_near: the driver is on this machine, and maps the memory of buckets.
    """

    def __init__(self, place: RankPlace, preloaded: str, *, is_near: bool) -> None:
        began_s = perf_counter()
        if place.rendezvous is not None:
            use_interface_to(place.rendezvous.host)
        os.environ.update(compiler_caches(os.environ))
        importlib.import_module(preloaded)
        self._place, self._is_near = place, is_near
        self._plans, self._stack = count(), ExitStack()
        self._worker: object = None
        self._stream: Generator[Filled, None, object] | None = None
        self._streamed, self._began_s = IMPORT, began_s
        self._end = StreamEnd(RankReply(None, IMPORT, began_s, now()))
        # Those whose memory the driver may still read, the oldest first.
        self._sent: deque[Filled] = deque()
        self._snapshots: dict[int, _Kept] = {}
        self._numbers = count()

    def imported(self) -> RankReply[object]:
        """The import of the worker's module."""
        return self._end.reply

    def begin(self, plan: bytes) -> RankReply[object]:
        """Build the worker of a pickled plan; the networks of the plan before are freed first."""
        began_s = perf_counter()
        loaded: RankPlan = pickle.loads(plan)
        self.close()
        place, number = self._place, next(self._plans)
        if place.rendezvous is not None:
            place = place._replace(rendezvous=place.rendezvous._replace(plan=number))
        with naming_holders():
            self._worker = self._stack.enter_context(loaded.worker(place))
        return RankReply(None, BEGIN, began_s, now())

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> RankReply[object]:
        """Call a method of the worker; a stream of it runs to its end, and its buckets go nowhere."""
        began_s = perf_counter()
        with naming_holders():
            value = getattr(self._worker, method)(*args, **kwargs)
        if not isinstance(value, Generator):
            return RankReply(value, method, began_s, now())
        self._stream, self._streamed, self._began_s = value, method, began_s
        return self.end_stream()

    def begin_stream(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begin a stream of the worker."""
        self._streamed, self._began_s = method, perf_counter()
        self._stream = self._begun(method, args, kwargs)

    def next_bucket(self, is_free: bool | None) -> SentBucket | StreamEnd:
        """The next bucket of the stream, or its end, however often that is asked for.

        is_free: the driver reads the oldest bucket no more, whose memory is filled again; False: it keeps
        it; None: it has not received one since its last call.
        """
        if is_free is not None:
            oldest = self._sent.popleft()
            if is_free:
                oldest.pool.give_back(oldest.buffer)
        if self._stream is None:
            return self._end
        try:
            with naming_holders():
                filled = next(self._stream)
        except StopIteration as end:
            self._stream = None
            self._end = StreamEnd(RankReply(end.value, self._streamed, self._began_s, now()))
            return self._end
        self._sent.append(filled)
        return SentBucket(filled.tensors, self._data_of(filled))

    def end_stream(self) -> RankReply[object]:
        """Run the stream to its end, without its buckets."""
        while not isinstance(bucket := self.next_bucket(None), StreamEnd):
            # Nobody reads this one.
            last = self._sent.pop()
            last.pool.give_back(last.buffer)
        self._sent.clear()
        return bucket.reply

    def keep_stream(
        self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> RankReply[SnapshotFacts]:
        """Run a stream of the worker to its end, and keep its buckets here until they are freed."""
        began_s = perf_counter()
        number, filled = next(self._numbers), list[Filled]()
        with naming_holders():
            snapshot = LocalSnapshot.of_stream(_kept(self._begun(method, args, kwargs), filled))
        self._snapshots[number] = _Kept(snapshot, filled)
        facts = SnapshotFacts(number, parts_of(snapshot.content), snapshot.checksum, snapshot.not_finite)
        return RankReply(facts, method, began_s, now())

    def run_work(self, number: int, work: bytes) -> RankReply[object]:
        """Call a pickled function with the buckets of a snapshot."""
        began_s, function = perf_counter(), pickle.loads(work)
        value = function(self._snapshots[number].snapshot.content)
        return RankReply(value, _name_of(function), began_s, now())

    def data_of(self, number: int, bucket: int) -> SharedBytes | Bytes:
        """The bytes of a bucket of a snapshot, or where they are."""
        return self._data_of(self._snapshots[number].filled[bucket])

    def free_snapshot(self, number: int, in_use: Collection[int] = ()) -> None:
        """Free a snapshot: its memory is filled again, but for that of buckets which the driver maps."""
        snapshot, filled = self._snapshots.pop(number)
        snapshot.free()
        for index, each in enumerate(filled):
            if index not in in_use:
                each.pool.give_back(each.buffer, idle_bytes=IDLE_BYTES)

    def close(self) -> None:
        """Close the worker."""
        self._worker = None
        self._stack.close()

    def _begun(
        self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Generator[Filled, None, int]:
        stream = getattr(self._worker, method)(*args, **kwargs)
        assert isinstance(stream, Generator), f"{method} gives buckets"
        return stream

    def _data_of(self, filled: Filled) -> SharedBytes | Bytes:
        data = bucket_of(filled).data
        return SharedBytes(filled.buffer.path, len(data)) if self._is_near else data


def _kept(stream: Generator[Filled, None, R], kept: list[Filled]) -> Generator[Bucket, None, R]:
    """The buckets of a stream, of which none is filled again; returns what the stream returns."""
    while True:
        try:
            kept.append(next(stream))
        except StopIteration as end:
            returned: R = end.value
            return returned
        yield bucket_of(kept[-1])


def _name_of(work: Callable[..., object]) -> str:
    """The name of a function, or of that of a partial."""
    return str(getattr(work.func if isinstance(work, partial) else work, "__name__", "work"))


@contextmanager
def naming_holders() -> Iterator[None]:
    """Raise an error of a full GPU as a sentence that says who holds its memory, while this rank still does.

    Raises:
        TrainerError: the block ran out of a GPU's memory.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        # The CPU's allocator has another sentence.
        if not is_out_of_memory(text) or "CUDA" not in text:
            raise
        raise TrainerError(f"its GPU is full ({held_text() or text.splitlines()[0]}); {_REMEDY}") from error
