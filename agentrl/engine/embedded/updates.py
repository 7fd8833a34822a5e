"""Updates of the weights in the engine's process, beside its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import TypeAlias
from weakref import ref

from agentrl.engine.embedded.messages import Begin, Commit, EndUpdate, MessageAnswer, Put, UpdateMessage
from agentrl.engine.embedded.sink import EmbeddedSink
from agentrl.errors import AgentRLError, EngineError
from agentrl.types.seams import Bucket
from agentrl.weights.shared import mapped
from agentrl.weights.staging import Transaction

_Work: TypeAlias = tuple[int, UpdateMessage] | Future[None]
"""A numbered message, or what is done once the messages before it are handled and no update is open."""


class Updates:
    """Handles the messages of updates in their order, in a thread with an event loop of its own.

    A forward pass blocks the engine's loop. Here, an update waits for one only where it swaps the weights.

    sink: that of the engine that serves now. answer: sends an answer to the driver. fail: ends the process
    with an error, which is not the driver's. All three are called in the thread.
    """

    def __init__(
        self,
        sink: Callable[[], EmbeddedSink],
        answer: Callable[[MessageAnswer], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._sink, self._answer, self._fail = sink, answer, fail
        self._loop = asyncio.new_event_loop()
        self._inbox = asyncio.Queue[_Work]()
        self._open = AsyncExitStack()
        self._transaction: Transaction | None = None
        threading.Thread(target=self._run, name="agentrl-updates", daemon=True).start()

    def post(self, number: int, message: UpdateMessage) -> None:
        """Handle a message after the earlier ones; callable from any thread."""
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, (number, message))

    async def end(self) -> None:
        """Handle what was posted, then end the open update without a commit; called in another loop."""
        ended = Future[None]()
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, ended)
        await asyncio.wrap_future(ended)

    def _run(self) -> None:
        serving = self._loop.create_task(self._serve())
        serving.add_done_callback(self._fail_if_failed)
        self._loop.run_forever()

    def _fail_if_failed(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._fail(error)

    async def _serve(self) -> None:
        while True:
            work = await self._inbox.get()
            if isinstance(work, Future):
                await self._end()
                work.set_result(None)
                continue
            number, message = work
            try:
                self._answer(MessageAnswer(number, await self._handle(message)))
            except AgentRLError as error:
                self._answer(MessageAnswer(number, error=error))

    async def _handle(self, message: UpdateMessage) -> object:
        match message:
            case Begin():
                update = self._sink().begin(message.manifest, message.version)
                self._transaction = await self._open.enter_async_context(update)
            case Put():
                return await self._put(message)
            case Commit():
                await self._staged.commit(message.checksum)
                return self._sink().standstill_s
            case EndUpdate():
                await self._end()
        return None

    async def _put(self, put: Put) -> bool:
        """Stage a bucket; returns whether the engine still uses its memory."""
        data = mapped(f"/proc/{put.pid}/fd/{put.descriptor}", put.num_bytes, shared=True).numpy()
        data_ref = ref(data)
        bucket = Bucket(put.tensors, data)
        del data
        # A bucket that is rejected ends the update: what was sent after it is refused.
        transaction, self._transaction = self._staged, None
        await transaction.put(bucket)
        self._transaction = transaction
        del bucket
        return data_ref() is not None

    async def _end(self) -> None:
        self._transaction = None
        await self._open.aclose()

    @property
    def _staged(self) -> Transaction:
        if self._transaction is None:
            raise EngineError("no update of weights has begun; begin one.")
        return self._transaction
