"""The embedded engine in a process of its own, the driver's side: the same guarantees as inline."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

from agentrl.engine.embedded import messages
from agentrl.engine.watches import Watches
from agentrl.errors import EngineDiedError, EngineError
from agentrl.processes.child import Child, ProcessFailure
from agentrl.processes.gpus import NO_GPU
from agentrl.runtime.activity import ENDED, LOADS, RESTS, SERVES, current_activities
from agentrl.runtime.clocks import Waits
from agentrl.types import Completion
from agentrl.types.seams import Bucket, MemoryTag, Sampling, TensorSpec, Watch
from agentrl.weights.shared import BufferPool, SharedBuffer

_MODULE = "agentrl.engine.embedded"
_BUCKET_BYTES = 1 << 20
# While the engine loads one, the next one is copied.
_MAX_PUTS = 2
# Answers that one iteration of the event loop settles. Each begins the work of an episode's turn, tenths of a
# millisecond, which the results of tools would wait for if all that have arrived were settled together.
_SETTLED_AT_ONCE = 4


class EngineProcess:
    """A process that serves one engine at a time. folder: of its log, engine.log. name: in the run's status.

    The process starts in the constructor and imports torch in the background. Messages of one iteration of
    the event loop are sent together. Several event loops may use it, one after the other.
    """

    def __init__(self, folder: Path, name: str = "engine") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._log = folder / "engine.log"
        self._child = Child(_MODULE, (), self._log, NO_GPU)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[messages.Numbered] = []
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._watches: dict[int, Watch] = {}
        # Where there are any, the loop has a call of `_settle_some`.
        self._arrived: deque[messages.MessageAnswer] = deque()
        self._number = 0
        self._failure: str | None = None
        self._last_message: ProcessFailure | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def post(self, message: messages.Message) -> int:
        """Send a message; returns the number of its answer, which need not be awaited.

        Raises:
            EngineDiedError: the process has ended.
        """
        if self._failure is not None:
            raise EngineDiedError(self._failure)
        self._start_reading()
        self._number += 1
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((self._number, message))
        return self._number

    def send(self, message: messages.Message) -> asyncio.Future[object]:
        """Send a message; the future of its answer.

        Raises:
            EngineDiedError: the process has ended.
        """
        number = self.post(message)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        return answer

    async def call(self, message: messages.Message, watch: Watch | None = None) -> object:
        """Send a message and return its answer. A cancelled call drops its answer. watch: is shown tokens.

        Raises:
            EngineError: the engine refused it, or the process has ended (EngineDiedError).
        """
        answer = self.send(message)
        number = self._number
        if watch is not None:
            self._watches[number] = watch
        try:
            return await answer
        except asyncio.CancelledError:
            if isinstance(message, messages.Generate) and self._failure is None:
                self.post(messages.Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)
            self._watches.pop(number, None)

    def end(self) -> None:
        """End the process."""
        self._stop_reading()
        self._failure = self._failure or "the embedded engine has been ended; build a new one."
        self._child.pipe.close()
        self._child.kill()

    def _start_reading(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._stop_reading()
            self._loop = loop
            loop.add_reader(self._child.pipe.fileno(), self._read)
            if self._arrived:
                loop.call_soon(self._settle_some)

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._child.pipe.fileno())
        self._loop = None

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        # Where the process has ended, the next read reports it.
        with suppress(OSError):
            self._child.pipe.send(messages)

    def _read(self) -> None:
        settling = bool(self._arrived)
        try:
            while self._child.pipe.poll():
                message = self._child.pipe.recv()
                if isinstance(message, ProcessFailure):
                    self._last_message = message
                    continue
                self._arrived.extend(cast(Sequence[messages.MessageAnswer], message))
        except (EOFError, OSError):
            self._die()
        if not settling:
            self._settle_some()

    def _settle_some(self) -> None:
        for _ in range(min(_SETTLED_AT_ONCE, len(self._arrived))):
            self._settle(self._arrived.popleft())
        if self._arrived and self._loop is not None:
            self._loop.call_soon(self._settle_some)

    def _settle(self, answer: messages.MessageAnswer) -> None:
        if isinstance(answer.value, messages.Shown):
            watch = self._watches.get(answer.number)
            if watch is not None:
                watch(answer.value.token_ids)
            return
        future = self._waiting.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    def _die(self) -> None:
        while self._arrived:
            self._settle(self._arrived.popleft())
        self._stop_reading()
        ended = self._child.exit_description() or "has ended"
        reason = f": {self._last_message.error}" if self._last_message else ""
        self._failure = f"the embedded engine (process {self.pid}) {ended}{reason}; see {self._log}."
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDiedError(self._failure))
        self._waiting.clear()


class ProcessEngine:
    """An engine in a process, created by `opened`. Once closed, it leaves the process to another engine."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._closed = False
        self._released: set[MemoryTag] = set()
        self._watches = Watches()
        self.watched = self._watches.watched
        self._waits = Waits()
        self._activities = current_activities()
        self.version = 0
        """The version of the weights that serve now."""
        self.sink = ProcessSink(process, self._serve, self._enter)
        """The sink of new weights. A commit drops every cache; running requests use the new weights."""
        self._enter()

    @classmethod
    async def opened(cls, process: EngineProcess, model: messages.Open) -> ProcessEngine:
        """Serve a model directory as version 0.

        Raises:
            ModelLoadError: the directory is missing or broken, or the architecture is not supported.
            EngineDiedError: the process has ended.
        """
        await process.call(model)
        return cls(process)

    @property
    def counts(self) -> Mapping[str, int]:
        """Empty: no request of this engine is retried or lost."""
        return {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the full prefix `prompt_ids`; cancelling frees the slot.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed max_context_len.
            EngineError: the engine is closed, the request is invalid, the session is busy, or a step failed;
                its process has ended (EngineDiedError).
        """
        if self._closed:
            raise EngineError("the engine is closed; build a new one.")
        watch = self._watches.get(session)
        request = messages.Generate(prompt_ids, sampling, session, watch is not None)
        with self._waits.entered():
            return cast(Completion, await self._process.call(request, watch))

    async def close_session(self, session: str) -> None:
        """Drop a session's cache; a request still running in it ends with finish = abort."""
        if not self._closed:
            self._process.post(messages.CloseSession(session))

    async def abort(self) -> None:
        """End every request, running or waiting, with its tokens so far; finish = abort."""
        await self._process.call(messages.Abort())

    async def release_memory(self, tags: Collection[MemoryTag]) -> int:
        """Free weights, cache or both, and hold all requests between two tokens; see `Engine`."""
        self._released |= set(tags)
        self._waits.leave()
        freed = cast(int, await self._process.call(messages.ReleaseMemory(tuple(tags))))
        self._enter()
        return freed

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate what was released; requests go on when nothing is missing any more; see `Engine`.

        Raises:
            EngineError: the cache is asked for, and the weights that were released have not been sent again.
        """
        await self._process.call(messages.ResumeMemory(tuple(tags)))
        self._released -= set(tags)
        if not self._released:
            self._waits.come_back()
        self._enter()

    async def close(self) -> None:
        """Abort all requests, then free the engine. A closed engine refuses requests."""
        if self._closed:
            return
        self._closed = True
        # Where the process has ended, there is nothing to free.
        with suppress(EngineDiedError):
            await self._process.call(messages.Close())
        self._enter(ENDED)

    def _enter(self, stage: str | None = None) -> None:
        """The process enters a stage, in the status of its run; None = it serves, if it has its memory."""
        if self._activities is not None:
            stage = stage or (RESTS if self._released else SERVES)
            where = f"process {self._process.pid}"
            self._activities.enter(self._process.name, stage, where=where, version=self.version)

    def _serve(self, version: int) -> None:
        self.version = version


class ProcessSink:
    """Sends weights to the process through shared memory. enter: called with a stage of the engine.

    standstill_s: how long, in the last update, requests waited while the engine computed nothing (seconds).
    """

    def __init__(
        self, process: EngineProcess, serve: Callable[[int], None], enter: Callable[[str | None], None]
    ) -> None:
        self._process, self._serve, self._enter = process, serve, enter
        self._pool = BufferPool(_BUCKET_BYTES)
        self.standstill_s = 0.0

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[ProcessTransaction]:
        """Start sending `version`.

        Raises:
            EngineError: the manifest leaves out a tensor, or has an unknown one or a wrong shape.
        """
        await self._process.call(messages.Begin(tuple(manifest), version))
        self._enter(LOADS)
        try:
            yield ProcessTransaction(self._process, self._pool, partial(self._committed, version))
        finally:
            # The answer would come after the next forward pass, which computes all prefixes again.
            with suppress(EngineDiedError):
                self._process.post(messages.EndUpdate())
            self._enter(None)

    def _committed(self, version: int, standstill_s: float) -> None:
        self.standstill_s = standstill_s
        self._serve(version)


class ProcessTransaction:
    """The update to one version. committed: called when the engine serves it, with its standstill.

    A busy engine answers between two forward passes. So the messages are sent without waiting for each
    answer: `_MAX_PUTS` buckets are on their way at most, and the commit follows them at once.
    """

    def __init__(self, process: EngineProcess, pool: BufferPool, committed: Callable[[float], None]) -> None:
        self._process, self._pool, self._committed = process, pool, committed
        self._puts: list[asyncio.Future[object]] = []

    async def put(self, bucket: Bucket) -> None:
        """Copy a bucket to shared memory, and send it; the process stages its tensors later.

        Raises:
            EngineError: a tensor of this bucket or of an earlier one is not in the manifest, was sent before,
                or its bytes do not add up. It may come at a later put, or at commit.
        """
        while self._puts and (self._puts[0].done() or len(self._puts) >= _MAX_PUTS):
            await asyncio.shield(self._puts[0])
            del self._puts[0]
        num_bytes = bucket.data.nbytes
        buffer = self._pool.take(max(1, num_bytes))
        await asyncio.to_thread(_copy, bucket, buffer)
        put = messages.Put(bucket.tensors, os.getpid(), buffer.descriptor, num_bytes)
        answer = self._process.send(put)
        # Until then, the callback keeps the buffer alive: the process opens it by a descriptor of this one.
        answer.add_done_callback(partial(self._reuse, buffer))
        self._puts.append(answer)

    async def commit(self, checksum: int) -> None:
        """Compare the checksum of the loaded tensors, and swap between two tokens of every request.

        Raises:
            EngineError: tensors are missing or damaged, or a bucket was rejected; the old version stays in
                service.
        """
        commit = self._process.send(messages.Commit(checksum))
        commit.add_done_callback(_note_failure)
        await asyncio.wait([*self._puts, commit])
        for put in self._puts:
            put.result()
        self._committed(cast(float, commit.result()))

    def _reuse(self, buffer: SharedBuffer, answer: asyncio.Future[object]) -> None:
        is_in_use = answer.cancelled() or answer.exception() is not None or answer.result()
        if not is_in_use:
            self._pool.give_back(buffer)


def _note_failure(answer: asyncio.Future[object]) -> None:
    """Where a bucket's answer failed first, nobody reads this one, and asyncio would report that."""
    if not answer.cancelled():
        answer.exception()


def _copy(bucket: Bucket, buffer: SharedBuffer) -> None:
    buffer.bytes_B.numpy()[: bucket.data.nbytes] = bucket.data
