"""The embedded engine in a process of its own, the driver's side: the same guarantees as inline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

from agentrl.engine.embedded import hosted
from agentrl.errors import EngineDiedError, EngineError
from agentrl.processes import Child, ProcessFailure
from agentrl.protocols import Bucket, Sampling, TensorSpec
from agentrl.types import Completion
from agentrl.weights.shared import BufferPool, SharedBuffer

_MODULE = "agentrl.engine.embedded"
_BUCKET_BYTES = 1 << 20


class EngineProcess:
    """A process that serves one engine at a time. folder: of its log, engine.log.

    The process starts in the constructor and imports torch in the background. Messages of one iteration of
    the event loop are sent together. Several event loops may use it, one after the other.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "engine.log"
        self._child = Child(_MODULE, (), self._log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[hosted.Numbered] = []
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._number = 0
        self._failure: str | None = None
        self._last_message: ProcessFailure | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def post(self, message: hosted.Message) -> int:
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

    async def call(self, message: hosted.Message) -> object:
        """Send a message and return its answer. A cancelled call drops its answer.

        Raises:
            EngineError: the engine refused it, or the process has ended (EngineDiedError).
        """
        number = self.post(message)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            if isinstance(message, hosted.Generate) and self._failure is None:
                self.post(hosted.Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)

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
        try:
            while self._child.pipe.poll():
                message = self._child.pipe.recv()
                if isinstance(message, ProcessFailure):
                    self._last_message = message
                    continue
                for answer in cast(Sequence[hosted.Answer], message):
                    self._settle(answer)
        except (EOFError, OSError):
            self._die()

    def _settle(self, answer: hosted.Answer) -> None:
        future = self._waiting.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    def _die(self) -> None:
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
        self.version = 0
        """The version of the weights that serve now."""
        self.sink = ProcessSink(process, self._serve)
        """The sink of new weights. A commit drops every cache; running requests use the new weights."""

    @classmethod
    async def opened(cls, process: EngineProcess, model: hosted.Open) -> ProcessEngine:
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
        return cast(Completion, await self._process.call(hosted.Generate(prompt_ids, sampling, session)))

    async def close_session(self, session: str) -> None:
        """Drop a session's cache; a request still running in it ends with finish = abort."""
        if not self._closed:
            self._process.post(hosted.CloseSession(session))

    async def abort(self) -> None:
        """End every request, running or waiting, with its tokens so far; finish = abort."""
        await self._process.call(hosted.Abort())

    async def close(self) -> None:
        """Abort all requests, then free the engine. A closed engine refuses requests."""
        if self._closed:
            return
        self._closed = True
        # Where the process has ended, there is nothing to free.
        with suppress(EngineDiedError):
            await self._process.call(hosted.Close())

    def _serve(self, version: int) -> None:
        self.version = version


class ProcessSink:
    """Sends weights to the process through shared memory."""

    def __init__(self, process: EngineProcess, serve: Callable[[int], None]) -> None:
        self._process, self._serve = process, serve
        self._pool = BufferPool(_BUCKET_BYTES)

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[ProcessTransaction]:
        """Start sending `version`.

        Raises:
            EngineError: the manifest leaves out a tensor, or has an unknown one or a wrong shape.
        """
        await self._process.call(hosted.Begin(tuple(manifest), version))
        try:
            yield ProcessTransaction(self._process, self._pool, lambda: self._serve(version))
        finally:
            with suppress(EngineDiedError):
                await self._process.call(hosted.EndUpdate())


class ProcessTransaction:
    """The update to one version. serve: called when the engine serves it."""

    def __init__(self, process: EngineProcess, pool: BufferPool, serve: Callable[[], None]) -> None:
        self._process, self._pool, self._serve = process, pool, serve

    async def put(self, bucket: Bucket) -> None:
        """Copy a bucket to shared memory, and have the process stage its tensors.

        Raises:
            EngineError: a tensor is not in the manifest, was sent before, or its bytes do not add up.
        """
        num_bytes = bucket.data.nbytes
        buffer = self._pool.take(max(1, num_bytes))
        await asyncio.to_thread(_copy, bucket, buffer)
        in_use = await self._process.call(
            hosted.Put(bucket.tensors, os.getpid(), buffer.descriptor, num_bytes)
        )
        if not in_use:
            self._pool.give_back(buffer)

    async def commit(self, checksum: int) -> None:
        """Compare the checksum of the loaded tensors, and swap between two tokens of every request.

        Raises:
            EngineError: tensors are missing or the checksum differs; the old version stays in service.
        """
        await self._process.call(hosted.Commit(checksum))
        self._serve()


def _copy(bucket: Bucket, buffer: SharedBuffer) -> None:
    buffer.bytes_B.numpy()[: bucket.data.nbytes] = bucket.data
