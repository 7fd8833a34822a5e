"""Resources that are opened once and stay open longer than one call: servers, clients, warm processes.

`Held` keeps a context manager open in a task of its own. `Shared` keeps one resource per event loop, opened
at its first use. Both are closed when the loop ends: `asyncio.run` cancels their tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from agentrl.errors import ToolError

_T_co = TypeVar("_T_co", covariant=True)


class Held(Generic[_T_co]):
    """A context manager that is entered now and exited later, perhaps on the request of another task.

    Consumes: the manager. Waits for: close(), or the end of the event loop, which cancels its task. The
    manager is entered and exited in that one task: the cancel scopes of some libraries require it.
    """

    def __init__(self, manager: AbstractAsyncContextManager[_T_co], name: str) -> None:
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[_T_co] = loop.create_future()
        self._closing = asyncio.Event()
        # An empty context: a shared resource must not keep the context variables of its first user.
        self._task = loop.create_task(self._hold(manager), name=name, context=Context())
        # value() and close() raise its exception; without a caller, asyncio would log it as never retrieved.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def over(self) -> bool:
        """Whether it was closed, could not be opened, or ended by itself."""
        return self._closing.is_set() or self._task.done()

    async def value(self) -> _T_co:
        """The value of the manager, as soon as it is open. Cancelling the wait leaves it open for others.

        Raises:
            Exception: whatever opening it raised.
            ToolError: it was closed before it was open.
        """
        either: list[asyncio.Future[_T_co] | asyncio.Task[None]] = [self._ready, self._task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        if self._task.cancelled():
            raise ToolError("unavailable", f"{self._task.get_name()} was closed while it was opening")
        raise self._task.exception() or ToolError("unavailable", f"{self._task.get_name()} did not open")

    async def close(self) -> None:
        """Exit the manager, also while it is still opening. Closing twice is fine.

        Raises:
            Exception: whatever exiting it raised.
        """
        self._closing.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task])
        if self._ready.done() and not self._task.cancelled():
            self._task.result()

    async def _hold(self, manager: AbstractAsyncContextManager[_T_co]) -> None:
        try:
            async with manager as value:
                self._ready.set_result(value)
                await self._closing.wait()
        finally:
            _held.get(asyncio.get_running_loop(), set()).discard(self)


_held: WeakKeyDictionary[asyncio.AbstractEventLoop, set[Held[object]]] = WeakKeyDictionary()


class Shared(Generic[_T_co]):
    """One resource for all episodes of an event loop, opened at its first use.

    open: creates the context manager, which is entered and exited in a task of its own.
    """

    def __init__(self, open: Callable[[], AbstractAsyncContextManager[_T_co]], name: str) -> None:
        self._open = open
        self._name = name
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Held[_T_co]] = WeakKeyDictionary()

    async def get(self) -> _T_co:
        """The resource; opened again after it was closed or ended.

        Raises:
            Exception: whatever opening it raised.
        """
        loop = asyncio.get_running_loop()
        held = self._by_loop.get(loop)
        if held is None or held.over:
            held = self._by_loop[loop] = Held(self._open(), self._name)
            _held.setdefault(loop, set()).add(held)
        return await held.value()

    async def drop(self, value: object) -> None:
        """Close the resource if it is still `value`: the next get() opens another."""
        loop = asyncio.get_running_loop()
        held = self._by_loop.get(loop)
        if held is not None and not held.over and await held.value() is value:
            await held.close()


async def release_shared() -> None:
    """Close all shared resources of this event loop. Each opens again at its next use.

    Raises:
        Exception: whatever closing one of them raised; the others are closed, too.
    """
    resources = list(_held.get(asyncio.get_running_loop(), set()))
    outcomes = await asyncio.gather(*(held.close() for held in resources), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
