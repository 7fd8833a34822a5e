"""The clocks of stages: they count the time of the work itself, without waits, pauses and restarts.

    episode   600 s   |------ counts ------|                                        |--- counts ---
    step       60 s                 |counts|                                        |counts
    tool       30 s                        | waits for a slot |counts| sandbox  |counts|
                                           ^ clocks_stopped() |      | restarts |

The deadline of a stage is the end of its clock. Slow infrastructure is not the fault of the model, nor of the
environment: what the work waits for stops the clocks of all stages around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic, perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary

_PULSE_S = 0.25
_RESOLUTION_S = 1e-3


class Stoppable(Protocol):
    """What counts time: a `Clock`, a `SharedDeadline`."""

    def stop(self) -> None:
        """Stop counting, until as many `resume` calls."""

    def resume(self) -> None:
        """Undo one `stop`."""


class StoppedClocks:
    """The clocks that a block of `clocks_stopped()` has stopped."""

    def __init__(self, clocks: Sequence[Stoppable]) -> None:
        self._clocks = [clock for clock in clocks if isinstance(clock, Clock)]

    def charge(self, seconds: float) -> None:
        """Count work of the block after all, on the clocks that no other block has stopped.

        seconds: at most as long as the block has lasted.
        """
        for clock in self._clocks:
            clock.charge(seconds)


@contextmanager
def clocks_stopped() -> Iterator[StoppedClocks]:
    """Stop the clocks of all stages around this block, those of the tasks that began this one included.

    For time that is no work of these stages: a wait for a slot, a server that is restarted, or work that has
    a limit of its own. A stage that begins inside the block has its own clock. The block must end by itself:
    no deadline outside ends it.
    """
    clocks = _own_clocks()
    _stop(clocks)
    try:
        yield StoppedClocks(clocks)
    finally:
        _resume(clocks)


@contextmanager
def relayed_to(clock: Stoppable) -> Iterator[None]:
    """In this block, and in tasks that it starts, waits stop this, too: the clocks of another process."""
    outer = _relays.get()
    _relays.set((*outer, clock))
    try:
        yield
    finally:
        _relays.set(outer)


def _own_clocks() -> Sequence[Stoppable]:
    """The clocks of the stages around the caller, in this event loop."""
    loop = asyncio.get_running_loop()
    # A thread that a stage waits for has its context, and may run an event loop of its own.
    return [*(clock for clock in _clocks.get() if clock.loop is loop), *_relays.get()]


def _stop(clocks: Iterable[Stoppable]) -> None:
    for clock in clocks:
        clock.stop()


def _resume(clocks: Iterable[Stoppable]) -> None:
    for clock in clocks:
        clock.resume()


class Waits:
    """Calls that wait for one thing, such as an engine: while it is away, the clocks of all of them stop."""

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence[Stoppable]] = {}
        self._is_away = False
        self._number = 0

    @contextmanager
    def entered(self, *clocks: Stoppable) -> Iterator[None]:
        """The block is such a wait: while the thing is away, these are stopped.

        clocks: left out, those of the stages around the block.
        """
        self._number += 1
        number, clocks = self._number, clocks or tuple(_own_clocks())
        self._waiting[number] = clocks
        if self._is_away:
            _stop(clocks)
        try:
            yield
        finally:
            del self._waiting[number]
            if self._is_away:
                _resume(clocks)

    def leave(self) -> None:
        """The thing is away from now on."""
        if not self._is_away:
            self._is_away = True
            for clocks in self._waiting.values():
                _stop(clocks)

    def come_back(self) -> None:
        """The thing is there again."""
        if self._is_away:
            self._is_away = False
            for clocks in self._waiting.values():
                _resume(clocks)


class Clock:
    """Counts seconds from now on, and makes `deadline` expire, once entered, when `seconds` are used up.

    It stops in `clocks_stopped()`, and while the event loop is blocked or its process is suspended. Stopping
    leaves the timer as it is: a timer that fires early is set again, for the rest.
    """

    __slots__ = (
        *("_handle", "_left_s", "_num_stops", "_outer", "_paused_s", "_pulse", "_since_s", "_total_s"),
        *("deadline", "loop"),
    )

    def __init__(self, seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = asyncio.timeout(None)
        self._total_s = self._left_s = seconds
        self._since_s, self._paused_s = monotonic(), 0.0
        self._num_stops = 0
        self._pulse: _Pulse | None = None
        self._outer = _clocks.get()
        _clocks.set((*self._outer, self))
        # The timer starts when the body first waits: most stages end before that, and need none. Thousands of
        # timers at once are a heap that every new one is sorted into.
        self._handle: asyncio.Handle | None = self.loop.call_soon(self._begin_timer)

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._total_s - self._left_s + (0.0 if self._num_stops else self._elapsed_s())

    def stop(self) -> None:
        """Stop counting, until as many `resume` calls."""
        if not self._num_stops:
            self._left_s -= self._elapsed_s()
        self._num_stops += 1

    def resume(self) -> None:
        """Undo one `stop`."""
        self._num_stops -= 1
        if self._num_stops:
            return
        self._since_s = monotonic()
        self._paused_s = 0.0 if self._pulse is None else self._pulse.paused_s
        if self._handle is None:
            self._set_timer()

    def charge(self, seconds: float) -> None:
        """Count seconds while it is stopped, unless it is stopped more than once."""
        if self._num_stops != 1:
            return
        self._left_s -= seconds
        if self._pulse is not None and self._handle is not None:
            # `resume` sets a timer for what is left now.
            self._handle.cancel()
            self._handle = None

    def end(self) -> None:
        """Stop for good, where the stage ends."""
        self.stop()
        _clocks.set(self._outer)
        if self._handle is not None:
            self._handle.cancel()
            # Its context has this clock: without the cycle no collector is needed.
            self._handle = None
        if self._pulse is not None:
            self._pulse.num_clocks -= 1

    def _elapsed_s(self) -> float:
        """Seconds since the last restart, without pauses, of a clock that is not stopped."""
        elapsed_s = monotonic() - self._since_s
        if self._pulse is None:
            return elapsed_s
        return max(elapsed_s - self._pulse.paused_s + self._paused_s, 0.0)

    def _begin_timer(self) -> None:
        self._pulse = _Pulse.of_loop()
        self._pulse.add_clock()
        self._paused_s = self._pulse.paused_s
        self._set_timer()

    def _set_timer(self) -> None:
        elapsed_s = 0.0 if self._num_stops else self._elapsed_s()
        due_s = self.loop.time() + self._left_s - elapsed_s
        self._handle = self.loop.call_at(due_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if self._num_stops:
            return
        if self._left_s - self._elapsed_s() > _RESOLUTION_S:
            self._set_timer()
        elif not self.deadline.expired():
            self.deadline.reschedule(self.loop.time())


class SharedDeadline:
    """A deadline that several tasks have in common. It is no stage's: a wait of one task does not stop it.

    seconds: from now on, without those between `stop` and `resume`.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s, self._since_s = seconds, self._loop.time()
        self._num_stops = 0
        self._limits: set[asyncio.Timeout] = set()

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._remaining_s() <= 0.0

    @contextmanager
    def ends(self, limit: asyncio.Timeout) -> Iterator[None]:
        """At the deadline, `limit` ends the block inside of its own."""
        self._limits.add(limit)
        self._set(limit)
        try:
            yield
        finally:
            self._limits.remove(limit)

    def stop(self) -> None:
        """Stop counting, until as many `resume` calls."""
        self._left_s = self._remaining_s()
        self._num_stops += 1
        self._set(*self._limits)

    def resume(self) -> None:
        """Undo one `stop`."""
        self._num_stops -= 1
        self._since_s = self._loop.time()
        self._set(*self._limits)

    def _remaining_s(self) -> float:
        return self._left_s - (0.0 if self._num_stops else self._loop.time() - self._since_s)

    def _set(self, *limits: asyncio.Timeout) -> None:
        due_s = None if self._num_stops else self._since_s + self._left_s
        for limit in limits:
            # One that has fired ends its block in the next iteration of the event loop.
            if not limit.expired():
                limit.reschedule(due_s)


class _Pulse:
    """Measures pauses of an event loop: it was blocked, or its process was suspended.

    It wakes up four times a second while a clock has a timer. A delay of more than a quarter of a second is a
    pause. paused_s: seconds of all pauses, one in progress included.
    """

    def __init__(self) -> None:
        self.num_clocks = 0
        self._ended_pauses_s = 0.0
        self._due_s: float | None = None

    @classmethod
    def of_loop(cls) -> _Pulse:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _pulses:
            _pulses[loop] = cls()
        return _pulses[loop]

    @property
    def paused_s(self) -> float:
        """See the class."""
        delay_s = 0.0 if self._due_s is None else asyncio.get_running_loop().time() - self._due_s
        return self._ended_pauses_s + (delay_s if delay_s > _PULSE_S else 0.0)

    def add_clock(self) -> None:
        """Measure until as many clocks have ended (`num_clocks`)."""
        self.num_clocks += 1
        if self._due_s is None:
            self._set_timer()

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + _PULSE_S
        loop.call_at(self._due_s, self._wake)

    def _wake(self) -> None:
        self._ended_pauses_s, self._due_s = self.paused_s, None
        if self.num_clocks:
            self._set_timer()


class BlockTimer:
    """Adds up the time of blocks, waits and pauses included (seconds)."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._began: float | None = None

    @property
    def total_s(self) -> float:
        """The time of all blocks, with that of the current one so far."""
        return self._ended_s + (0.0 if self._began is None else perf_counter() - self._began)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The time of the block is added."""
        self._began = perf_counter()
        try:
            yield
        finally:
            self._ended_s, self._began = self.total_s, None


# Of the running stages, from the outermost to the innermost.
_clocks: ContextVar[tuple[Clock, ...]] = ContextVar("agentrl_clocks", default=())
_relays: ContextVar[tuple[Stoppable, ...]] = ContextVar("agentrl_relays", default=())
_pulses: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pulse] = WeakKeyDictionary()
