"""The embedded engine in a process of its own: the child's side.

    python -m agentrl.engine.embedded FD

Messages arrive in lists, in the order in which they were sent. Requests run concurrently. So does an update
of the weights, whose own messages are handled in their order. Every other message is handled before the next
one is read, so that a closed session is free for the next request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeAlias
from weakref import ref

import torch

from agentrl.checkpoints.fresh import draw_weights
from agentrl.checkpoints.source import open_source
from agentrl.engine.embedded.engine import EmbeddedEngine
from agentrl.errors import AgentRLError, EngineError
from agentrl.processes import SendFailure, follow_driver
from agentrl.protocols import Bucket, MemoryTag, Sampling, TensorSpec
from agentrl.types import Completion
from agentrl.weights.shared import mapped
from agentrl.weights.staging import Transaction


class Open(NamedTuple):
    """Serve the model in a directory, after the previous engine is closed. seed: draw its weights first.

    threads: that torch computes with (count). The others are those of `EmbeddedEngine.from_model`.
    """

    directory: str
    max_slots: int
    max_context_len: int | None
    deterministic: bool
    threads: int
    seed: int | None


class Generate(NamedTuple):
    """Sample a continuation of a prompt."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    session: str


class Cancel(NamedTuple):
    """Cancel the request of that number: its caller was cancelled."""

    number: int


class CloseSession(NamedTuple):
    """Drop a session's cache."""

    session: str


class Abort(NamedTuple):
    """End all requests with their tokens so far."""


class Begin(NamedTuple):
    """Begin an update of the weights."""

    manifest: Sequence[TensorSpec]
    version: int


class Put(NamedTuple):
    """A bucket of the update, in memory that the process `pid` has open as `descriptor`.

    The answer is whether the engine still uses that memory.
    """

    tensors: tuple[TensorSpec, ...]
    pid: int
    descriptor: int
    num_bytes: int


class Commit(NamedTuple):
    """Commit the update: all buckets were sent. The answer is how long the engine stood still (seconds)."""

    checksum: int


class EndUpdate(NamedTuple):
    """End the update, committed or not."""


class Release(NamedTuple):
    """Free memory, and hold all requests. The answer is how much the system got back (bytes)."""

    tags: Collection[MemoryTag]


class Resume(NamedTuple):
    """Allocate released memory again."""

    tags: Collection[MemoryTag]


class Close(NamedTuple):
    """Abort all requests, and free the engine."""


Message: TypeAlias = (
    Open
    | Generate
    | Cancel
    | CloseSession
    | Abort
    | Begin
    | Put
    | Commit
    | EndUpdate
    | Release
    | Resume
    | Close
)
Numbered: TypeAlias = tuple[int, Message]
"""A message, and the number of its answer."""


class Answer(NamedTuple):
    """The answer to a message: a value, or an error."""

    number: int
    value: object = None
    error: AgentRLError | None = None


class Host:
    """Serves one engine at a time.

    answer: sends answers to the driver. fail: ends the process with an error, which is not the driver's.
    """

    def __init__(
        self, answer: Callable[[Sequence[Answer]], None], fail: Callable[[BaseException], None]
    ) -> None:
        self._send, self._fail = answer, fail
        self._engine: EmbeddedEngine | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Answer] = []
        self._update = AsyncExitStack()
        # Its waiters go on in the order in which they came.
        self._updating = asyncio.Lock()
        self._update_calls: set[asyncio.Task[None]] = set()
        self._transaction: Transaction | None = None

    async def handle(self, messages: Sequence[Numbered]) -> None:
        """Handle messages in order; requests run as tasks."""
        for number, message in messages:
            if isinstance(message, Generate):
                self._requests[number] = asyncio.create_task(self._generate(number, message))
                continue
            # Earlier requests have to be in the engine's queue first.
            await asyncio.sleep(0)
            if isinstance(message, Begin | Put | Commit | EndUpdate):
                task = asyncio.create_task(self._reply(number, self._handle_update(message)))
                self._update_calls.add(task)
                task.add_done_callback(self._end_update_call)
            else:
                await self._reply(number, self._handle_other(message))

    async def close(self) -> None:
        """Free the engine."""
        async with self._updating:
            await self._update.aclose()
        if self._engine is not None:
            await self._engine.close()
        self._engine = None

    def _end_update_call(self, task: asyncio.Task[None]) -> None:
        self._update_calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _generate(self, number: int, message: Generate) -> None:
        try:
            await self._reply(number, self._complete(message))
        finally:
            del self._requests[number]

    async def _complete(self, message: Generate) -> Completion:
        return await self._served.generate(message.prompt_ids, message.sampling, session=message.session)

    async def _reply(self, number: int, work: Coroutine[None, None, object]) -> None:
        """Answer a message with the result of its work, or with its error."""
        try:
            self._answer(Answer(number, await work))
        except AgentRLError as error:
            self._answer(Answer(number, error=error))

    async def _handle_other(self, message: Message) -> object:
        match message:
            case Open():
                await self._open(message)
            case Cancel():
                await self._cancel(message.number)
            case CloseSession():
                await self._served.close_session(message.session)
            case Abort():
                await self._served.abort()
            case Release():
                return await self._served.release_memory(message.tags)
            case Resume():
                await self._served.resume_memory(message.tags)
            case Close():
                await self.close()
            case _:
                raise EngineError(f"the engine's process has no handler of {type(message).__name__}")
        return None

    async def _handle_update(self, message: Begin | Put | Commit | EndUpdate) -> object:
        async with self._updating:
            match message:
                case Begin():
                    update = self._served.sink.begin(message.manifest, message.version)
                    self._transaction = await self._update.enter_async_context(update)
                case Put():
                    return await self._put(message)
                case Commit():
                    await self._staged.commit(message.checksum)
                    return self._served.sink.standstill_s
                case EndUpdate():
                    self._transaction = None
                    await self._update.aclose()
        return None

    async def _open(self, message: Open) -> None:
        await self.close()
        torch.set_num_threads(message.threads)
        if message.seed is not None:
            draw_weights(Path(message.directory), message.seed)
        self._engine = EmbeddedEngine.from_pretrained(
            message.directory,
            max_slots=message.max_slots,
            max_context_len=message.max_context_len,
            decode=open_source(message.directory).decode,
            deterministic=message.deterministic,
        )

    async def _cancel(self, number: int) -> None:
        task = self._requests.get(number)
        if task is not None:
            task.cancel()
            # Its session is free for the next message.
            await asyncio.wait([task])

    async def _put(self, put: Put) -> bool:
        """Stage a bucket; returns whether the engine still uses its memory."""
        data = mapped(f"/proc/{put.pid}/fd/{put.descriptor}", put.num_bytes, shared=True).numpy()
        data_ref = ref(data)
        bucket = Bucket(put.tensors, data)
        del data
        await self._staged.put(bucket)
        del bucket
        return data_ref() is not None

    @property
    def _served(self) -> EmbeddedEngine:
        if self._engine is None:
            raise EngineError("the engine is closed; build a new one.")
        return self._engine

    @property
    def _staged(self) -> Transaction:
        if self._transaction is None:
            raise EngineError("no update of weights has begun; begin one.")
        return self._transaction

    def _answer(self, answer: Answer) -> None:
        # Requests that end in one step are answered together.
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        # Where the driver has exited, the reading thread detects it.
        with suppress(OSError):
            self._send(answers)


async def serve(pipe: Connection) -> None:
    """Serve until the driver has exited.

    The pipe is read in a thread, so that a sender never blocks while the engine computes a step.
    """
    loop = asyncio.get_running_loop()
    inbox = asyncio.Queue[Sequence[Numbered] | BaseException | None]()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, pipe.recv())
        loop.call_soon_threadsafe(inbox.put_nowait, None)

    threading.Thread(target=receive, daemon=True).start()
    host = Host(pipe.send, inbox.put_nowait)
    while (messages := await inbox.get()) is not None:
        if isinstance(messages, BaseException):
            raise messages
        await host.handle(messages)
    await host.close()


def main(descriptor: int) -> None:
    """Run the engine's process. descriptor: the child's end of the pipe."""
    pipe = Connection(descriptor)
    follow_driver(pipe)
    with SendFailure(pipe):
        asyncio.run(serve(pipe))
    sys.stdout.flush()
    # The threads that still run (they read pipes) end with the process.
    os._exit(0)
