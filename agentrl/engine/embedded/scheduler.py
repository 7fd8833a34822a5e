"""Requests and slots of the embedded engine: who waits, who runs, and the steps in between.

The pump is a task that consumes the queue of waiting requests. It runs while there are requests, one step
per iteration of the event loop, so that everything else (aborts, weights, new requests) happens at a token
boundary. It ends when no request waits or runs. When it raises, all requests fail.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from agentrl.engine.embedded.slots import Asker, Request, Slots, no_tokens
from agentrl.engine.embedded.step import Stepper
from agentrl.errors import EngineError
from agentrl.runtime.clocks import BlockTimer, Waits
from agentrl.types import Completion, Finish
from agentrl.types.seams import Watch

T = TypeVar("T")

# Iterations of the event loop between two steps: how many in a row may bring no request, how many in all.
_PATIENCE = 3
_MAX_YIELDS = 8


class Scheduler:
    """Gives waiting requests slots, by turns, and steps while any runs.

    is_held: whether no step may be made now; `start` goes on then.
    """

    def __init__(self, slots: Slots, stepper: Stepper, is_held: Callable[[], bool]) -> None:
        self._slots, self._stepper, self._is_held = slots, stepper, is_held
        self._waiting: Turns[Request] = Turns()
        self._pump: asyncio.Task[None] | None = None
        self._busy: set[str] = set()
        self._watches: dict[str, tuple[Watch, int]] = {}
        """By session, with the number of tokens that it was told."""
        self._between_steps = BlockTimer()
        self.waits = Waits()
        """The clocks of the requests: they stand while the engine is held."""

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait for a slot, and tokens of those that run, prompts included (counts)."""
        return len(self._waiting), int(self._slots.num_tokens[self._slots.active].sum())

    @property
    def standstill_s(self) -> float:
        """Time between steps, in all (seconds)."""
        return self._between_steps.total_s

    def check_free(self, session: str) -> None:
        """Check that no request of a session waits or runs.

        Raises:
            EngineError: one does.
        """
        if session in self._busy:
            raise EngineError(
                f"session {session} already runs a request; wait for it or name another session."
            )

    async def answer(self, request: Request, asker: Asker) -> Completion:
        """What becomes of a request. On cancellation, its slot is free, and its session's cache gone."""
        request.asker = asker
        self._waiting.add(request, asker.client)
        self._busy.add(request.session)
        self.start()
        try:
            with self.waits.entered():
                return await request.answer
        except asyncio.CancelledError:
            self._discard(request)
            raise
        finally:
            self._busy.discard(request.session)

    def start(self) -> None:
        """Step from now on, if it does not already."""
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="agentrl-engine-pump")
            self._pump.add_done_callback(self._settle)

    def go_on(self) -> None:
        """Step from now on, if a request runs or waits."""
        if self.pending():
            self.start()

    def partial_completion(self, session: str) -> Completion | None:
        """The tokens that a session's running request has sampled so far, as if it were aborted."""
        for request in self._slots.requests:
            if request is not None and request.session == session and request.slot is not None:
                return self._slots.completion(request.slot, Finish.ABORT, None)
        return None

    @contextmanager
    def watched(self, session: str, watch: Watch) -> Iterator[None]:
        """Tell `watch` during the block the tokens of a session's request, after each step."""
        self._watches[session] = watch, 0
        try:
            yield
        finally:
            del self._watches[session]

    def pending(self) -> list[Request]:
        """The requests that run or wait."""
        return [request for request in (*self._slots.requests, *self._waiting) if request is not None]

    def end(self, request: Request) -> None:
        """End a request with its tokens so far."""
        completion = request.sampling.continues or no_tokens()
        if request.slot is not None:
            completion = self._slots.completion(request.slot, Finish.ABORT, None)
            self._slots.keep(request.slot)
        else:
            self._waiting.remove(request, request.asker.client)
        if not request.answer.done():
            request.answer.set_result(completion)

    async def ended(self) -> None:
        """Wait for the last step."""
        # A pump that is done may belong to another event loop, already closed.
        if self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])

    async def _run(self) -> None:
        patience = _PATIENCE
        while True:
            with self._between_steps.running():
                await self._gather(patience)
                if self._is_held():
                    return
                admitted = self._admit()
                if not self._slots.active.any():
                    return
            finished = self._stepper.step()
            now_s = time.perf_counter()
            for request in admitted:
                request.prefilled_s = now_s
            if self._watches:
                self._show()
            for request, completion in finished:
                if not request.answer.done():
                    request.answer.set_result(completion)
            patience = _PATIENCE if finished else 1

    def _show(self) -> None:
        """Show who watches a request its tokens of this step: none, one, or two after a prompt."""
        slots = self._slots
        for request in slots.requests:
            if request is None or request.slot is None or request.session not in self._watches:
                continue
            watch, shown = self._watches[request.session]
            start, end = int(slots.start[request.slot]), int(slots.num_tokens[request.slot])
            if end > start + shown:
                self._watches[request.session] = watch, end - start
                watch(slots.ids[request.slot, start + shown : end].tolist())

    async def _gather(self, patience: int) -> None:
        """Let finished sessions send their next requests, until `patience` iterations brought none."""
        num_empty = 0
        for _ in range(_MAX_YIELDS):
            before = len(self._waiting)
            await asyncio.sleep(0)
            num_empty = num_empty + 1 if len(self._waiting) == before else 0
            if num_empty >= patience:
                return

    def _admit(self) -> list[Request]:
        """Admit waiting requests by turns; those of a cached session first, because they need no new slot."""
        slots, admitted = self._slots, list[Request]()
        for request in [each for each in self._waiting if slots.sessions.idle_slot(each.session) is not None]:
            self._waiting.remove(request, request.asker.client)
            slots.admit(request)
            admitted.append(request)
        while self._waiting and slots.sessions.is_any_free:
            request = self._waiting.pop()
            slots.admit(request)
            admitted.append(request)
        now_s = time.perf_counter()
        for request in admitted:
            request.admitted_s = now_s
        return admitted

    def _discard(self, request: Request) -> None:
        """Drop a request whose caller was cancelled, and its session's cache."""
        if request.slot is not None and self._slots.requests[request.slot] is request:
            self._slots.release(request.slot)
        elif request in self._waiting:
            self._waiting.remove(request, request.asker.client)

    def _settle(self, pump: asyncio.Task[None]) -> None:
        """Fail the pending requests where the pump raised or was cancelled."""
        error = None if pump.cancelled() else pump.exception()
        if error is None and not pump.cancelled():
            return
        reason = "was cancelled" if error is None else f"failed: {type(error).__name__}: {error}"
        for request in self.pending():
            if not request.answer.done():
                failure = EngineError(f"the embedded engine {reason}; the request was not finished.")
                failure.__cause__ = error
                request.answer.set_exception(failure)
        self._waiting.clear()
        self._slots.clear()


class Turns(Generic[T]):
    """Entries that wait, of many clients. The entries of one client are in the order of their arrival.

    A client is a sequence of names, such as an address and a session. Those with different first names take
    turns; where it is the turn of a first name, those with different second names under it do, and so on. No
    client has two turns while another one of its level waits.
    """

    def __init__(self) -> None:
        self._own: deque[T] = deque()
        self._below: OrderedDict[str, Turns[T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        yield from self._own
        for turns in self._below.values():
            yield from turns

    def add(self, entry: T, client: Sequence[str] = ()) -> None:
        """Add an entry of a client. Without names it goes before those with names."""
        self._length += 1
        if client:
            self._below.setdefault(client[0], Turns()).add(entry, client[1:])
        else:
            self._own.append(entry)

    def pop(self) -> T:
        """Remove the entry whose turn it is.

        Raises:
            IndexError: nothing waits.
        """
        if not self._length:
            raise IndexError("nothing waits")
        self._length -= 1
        if self._own:
            return self._own.popleft()
        name, turns = self._below.popitem(last=False)
        entry = turns.pop()
        if turns:
            self._below[name] = turns
        return entry

    def remove(self, entry: T, client: Sequence[str] = ()) -> None:
        """Remove an entry of a client, which waits.

        Raises:
            ValueError, KeyError: it does not.
        """
        if client:
            turns = self._below[client[0]]
            turns.remove(entry, client[1:])
            if not turns:
                del self._below[client[0]]
        else:
            self._own.remove(entry)
        self._length -= 1

    def clear(self) -> None:
        """Remove all entries."""
        self._own.clear()
        self._below.clear()
        self._length = 0
