"""The embedded engine in a process of its own: the child's side.

    python -m agentrl.engine.embedded FD

Messages arrive in lists, in the order in which they were sent. Requests run concurrently. Updates of the
weights run in a thread of their own, see `Updates`. Every other message is handled before the next one is
read, so that a closed session is free for the next request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from agentrl.engine.embedded.engine import EmbeddedEngine
from agentrl.engine.embedded.messages import (
    Abort,
    Cancel,
    Close,
    CloseSession,
    Generate,
    Message,
    MessageAnswer,
    Numbered,
    Open,
    ReleaseMemory,
    ResumeMemory,
    Shown,
    UpdateMessage,
)
from agentrl.engine.embedded.sink import EmbeddedSink
from agentrl.engine.embedded.updates import Updates
from agentrl.errors import AgentRLError, EngineError
from agentrl.processes.child import SendFailure, follow_driver
from agentrl.types import Completion
from agentrl.weights.codec import torch_dtype
from agentrl.weights.hf.fresh import draw_weights
from agentrl.weights.hf.source import open_source


class EngineHost:
    """Serves one engine at a time. Created in the event loop in which it runs.

    send: sends answers to the driver, from any thread. fail: ends the process with an error, which is not the
    driver's, from any thread.
    """

    def __init__(
        self, send: Callable[[Sequence[MessageAnswer]], None], fail: Callable[[BaseException], None]
    ) -> None:
        self._send = send
        self._engine: EmbeddedEngine | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._answers: list[MessageAnswer] = []
        self._updates = Updates(self._sink, lambda answer: self._send_all([answer]), fail)

    def receive(self, messages: Sequence[Numbered]) -> Sequence[Numbered]:
        """Pass on the messages of updates, in any thread; returns the others, which are for `handle`."""
        others = []
        for number, message in messages:
            if isinstance(message, UpdateMessage):
                self._updates.post(number, message)
            else:
                others.append((number, message))
        return others

    async def handle(self, messages: Sequence[Numbered]) -> None:
        """Handle messages in order; requests run as tasks."""
        for number, message in messages:
            if isinstance(message, Generate):
                self._requests[number] = asyncio.create_task(self._generate(number, message))
                continue
            # Earlier requests have to be in the engine's queue first.
            await asyncio.sleep(0)
            await self._reply(number, self._handle_other(message))

    async def close(self) -> None:
        """Free the engine."""
        await self._updates.end()
        if self._engine is not None:
            await self._engine.close()
        self._engine = None

    async def _generate(self, number: int, message: Generate) -> None:
        try:
            await self._reply(number, self._complete(number, message))
        finally:
            del self._requests[number]

    async def _complete(self, number: int, message: Generate) -> Completion:
        def show(ids: Sequence[int]) -> None:
            self._answer(MessageAnswer(number, Shown(tuple(ids))))

        engine, session = self._served, message.session
        with engine.watched(session, show) if message.is_watched else nullcontext():
            return await engine.generate(message.prompt_ids, message.sampling, session=session)

    async def _reply(self, number: int, work: Coroutine[None, None, object]) -> None:
        """MessageAnswer a message with the result of its work, or with its error."""
        try:
            self._answer(MessageAnswer(number, await work))
        except AgentRLError as error:
            self._answer(MessageAnswer(number, error=error))

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
            case ReleaseMemory():
                return await self._served.release_memory(message.tags)
            case ResumeMemory():
                await self._served.resume_memory(message.tags)
            case Close():
                await self.close()
            case _:
                raise EngineError(f"the engine's process has no handler of {type(message).__name__}")
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
            dtype=torch_dtype(message.dtype),
            deterministic=message.deterministic,
        )
        self._engine.sink.loop = asyncio.get_running_loop()

    async def _cancel(self, number: int) -> None:
        task = self._requests.get(number)
        if task is not None:
            task.cancel()
            # Its session is free for the next message.
            await asyncio.wait([task])

    @property
    def _served(self) -> EmbeddedEngine:
        if self._engine is None:
            raise EngineError("the engine is closed; build a new one.")
        return self._engine

    def _sink(self) -> EmbeddedSink:
        return self._served.sink

    def _answer(self, answer: MessageAnswer) -> None:
        # Requests that end in one step are answered together.
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        self._send_all(answers)

    def _send_all(self, answers: Sequence[MessageAnswer]) -> None:
        # Where the driver has exited, the reading thread detects it.
        with suppress(OSError):
            self._send(answers)


async def serve(pipe: Connection) -> None:
    """Serve until the driver has exited.

    The pipe is read in a thread, so that a sender never blocks while the engine computes a step.
    """
    loop = asyncio.get_running_loop()
    inbox = asyncio.Queue[Sequence[Numbered] | BaseException | None]()
    sending = threading.Lock()

    def put(item: Sequence[Numbered] | BaseException | None) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, item)

    def send(answers: Sequence[MessageAnswer]) -> None:
        with sending:
            pipe.send(answers)

    host = EngineHost(send, put)

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                if messages := host.receive(pipe.recv()):
                    put(messages)
        put(None)

    threading.Thread(target=receive, daemon=True).start()
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
