"""One request on its way, and what may happen to it meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from agentrl.engine.sglang.draft import Draft

ABORT_TIMEOUT_S = 30.0
_ABORT_AGAIN_S = 0.2


class Flight:
    """A request from when it is asked until it is answered.

    rid: names what was sent last. ticket: lets it in, or, False, ends its waiting. cut: it is to end with
    what it has. sent: a server may be working on it. landed: nothing is on its way. overdue: nobody ended it.
    """

    def __init__(self, draft: Draft, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        self.draft, self.deadline = draft, deadline
        self.rid = ""
        self.ticket: asyncio.Future[bool] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.landed = asyncio.Event()
        self.landed.set()
        self.sent = False
        self.cut = asyncio.Event()
        self.overdue = False

    def take_off(self) -> None:
        """It is about to be sent, under a name that no server has seen."""
        # An abort ends every rid that begins with its own: none is the beginning of another.
        self.rid = uuid.uuid4().hex
        self.sent = True
        self.landed.clear()

    def land(self, *, sent: bool) -> None:
        """Nothing is on its way any longer. sent: a server may still be working on it."""
        self.sent = sent
        self.landed.set()

    def end(self) -> None:
        """It is answered."""
        self.landed.set()
        self.done.set_result(None)

    async def ended_by(self, abort: Callable[[str], Awaitable[None]]) -> None:
        """Ask for its end, again and again, until nothing of it is on its way.

        What ends a request may overtake the request itself. A server that does not answer in
        ABORT_TIMEOUT_S has lost it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ABORT_TIMEOUT_S
        while not self.landed.is_set():
            if loop.time() > until and not self.deadline.expired():
                self.overdue = True
                self.deadline.reschedule(loop.time())
            await abort(self.rid)
            landing = asyncio.ensure_future(self.landed.wait())
            await asyncio.wait([landing], timeout=_ABORT_AGAIN_S)
            landing.cancel()
