"""The embedded engine in a process of its own: what that process does.

    python -m agentrl.engine.embedded FD

Messages come in lists, in the order in which they were sent. Requests run side by side; everything else is
done before the next message is looked at, so that a session that was closed is free for the next request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
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
from agentrl.processes import LastMessage, follow_driver
from agentrl.protocols import Bucket, Sampling, TensorSpec
from agentrl.weights.shared import mapped
from agentrl.weights.staging import Transaction


class Open(NamedTuple):
    """Serve the model in a directory; the engine before is closed. seed: draw its weights first.

    threads: that torch computes with (count).
    """

    directory: str
    max_slots: int
    max_context_len: int | None
    threads: int
    seed: int | None


class Generate(NamedTuple):
    """Sample a continuation of a prompt."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    session: str


class Cancel(NamedTuple):
    """Nobody waits for the request of that number any more."""

    number: int


class CloseSession(NamedTuple):
    """Forget what is cached for a session."""

    session: str


class Abort(NamedTuple):
    """End all requests with what they have."""


class Begin(NamedTuple):
    """New weights are coming."""

    manifest: Sequence[TensorSpec]
    version: int


class Put(NamedTuple):
    """Some of them, in memory that the process `pid` has open as `descriptor`; answered: is it kept."""

    tensors: tuple[TensorSpec, ...]
    pid: int
    descriptor: int
    num_bytes: int


class Commit(NamedTuple):
    """All of them have come."""

    checksum: int


class EndUpdate(NamedTuple):
    """No more comes, committed or not."""


class Close(NamedTuple):
    """Abort, and free everything."""


Message: TypeAlias = (
    Open | Generate | Cancel | CloseSession | Abort | Begin | Put | Commit | EndUpdate | Close
)
Numbered: TypeAlias = tuple[int, Message]
"""A message, and the number of its answer."""


class Answer(NamedTuple):
    """What came of a message. value: it was done; error: it was not."""

    number: int
    value: object = None
    error: AgentRLError | None = None


class Host:
    """Serves one engine at a time. answer: sends answers back."""

    def __init__(self, answer: Callable[[Sequence[Answer]], None]) -> None:
        self._send = answer
        self._engine: EmbeddedEngine | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Answer] = []
        self._update = AsyncExitStack()
        self._transaction: Transaction | None = None

    async def take(self, messages: Sequence[Numbered]) -> None:
        """Do what is asked, one message after the other."""
        for number, message in messages:
            if isinstance(message, Generate):
                self._requests[number] = asyncio.create_task(self._generate(number, message))
                continue
            # Requests that came before have to be in the engine's queue.
            await asyncio.sleep(0)
            try:
                self._answer(Answer(number, await self._done(message)))
            except AgentRLError as error:
                self._answer(Answer(number, error=error))

    async def close(self) -> None:
        """Free the engine."""
        await self._update.aclose()
        if self._engine is not None:
            await self._engine.close()
        self._engine = None

    async def _generate(self, number: int, asked: Generate) -> None:
        try:
            done = await self._served.generate(asked.prompt_ids, asked.sampling, session=asked.session)
            self._answer(Answer(number, done))
        except AgentRLError as error:
            self._answer(Answer(number, error=error))
        finally:
            del self._requests[number]

    async def _done(self, message: Message) -> object:
        match message:
            case Open():
                await self._open(message)
            case Cancel():
                await self._cancel(message.number)
            case CloseSession():
                await self._served.close_session(message.session)
            case Abort():
                await self._served.abort()
            case Close():
                await self.close()
            case Begin() | Put() | Commit() | EndUpdate():
                return await self._updated(message)
            case _:
                raise EngineError(f"the engine's process does not know {type(message).__name__}")
        return None

    async def _updated(self, message: Begin | Put | Commit | EndUpdate) -> object:
        match message:
            case Begin():
                begun = self._served.sink.begin(message.manifest, message.version)
                self._transaction = await self._update.enter_async_context(begun)
            case Put():
                return await self._put(message)
            case Commit():
                await self._staged.commit(message.checksum)
            case EndUpdate():
                self._transaction = None
                await self._update.aclose()
        return None

    async def _open(self, asked: Open) -> None:
        await self.close()
        torch.set_num_threads(asked.threads)
        if asked.seed is not None:
            draw_weights(Path(asked.directory), asked.seed)
        self._engine = EmbeddedEngine.from_pretrained(
            asked.directory,
            max_slots=asked.max_slots,
            max_context_len=asked.max_context_len,
            decode=open_source(asked.directory).decode,
        )

    async def _cancel(self, number: int) -> None:
        task = self._requests.get(number)
        if task is not None:
            task.cancel()
            # Its session is free for the next message.
            await asyncio.wait([task])

    async def _put(self, put: Put) -> bool:
        """Whether the engine keeps the memory."""
        data = mapped(f"/proc/{put.pid}/fd/{put.descriptor}", put.num_bytes, shared=True).numpy()
        seen = ref(data)
        bucket = Bucket(put.tensors, data)
        del data
        await self._staged.put(bucket)
        del bucket
        return seen() is not None

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
        # A driver that has gone shows where it is listened to.
        with suppress(OSError):
            self._send(answers)


async def serve(pipe: Connection) -> None:
    """Serve until the driver has gone.

    The pipe is read in a thread: whoever sends never waits for a step of the engine to end.
    """
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Sequence[Numbered] | None]()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, pipe.recv())
        loop.call_soon_threadsafe(inbox.put_nowait, None)

    threading.Thread(target=listen, daemon=True).start()
    host = Host(pipe.send)
    while (messages := await inbox.get()) is not None:
        await host.take(messages)
    await host.close()


def main(descriptor: int) -> None:
    """Be the engine's process."""
    pipe = Connection(descriptor)
    follow_driver(pipe)
    with LastMessage(pipe):
        asyncio.run(serve(pipe))
    sys.stdout.flush()
    # What is left (threads that listen) ends with the process.
    os._exit(0)
