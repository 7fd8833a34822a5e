"""An event loop whose time is virtual: it jumps to the next scheduled callback, and nothing sleeps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

from agentrl.errors import AgentRLError

T = TypeVar("T")

# A callback that is due within it runs now. The step between two floats at the time has to be smaller, or a
# callback that is due at this very moment never runs: it is 0.1 microseconds after thirty years.
_RESOLUTION_S = 1e-6


class StalledError(AgentRLError):
    """Every task of a simulation waits, and nothing is scheduled that could end a wait."""


class _Clock:
    """Seconds since the loop was made."""

    def __init__(self) -> None:
        self.now_s = 0.0


class _JumpingSelector(selectors.DefaultSelector):
    """Polls its files, and moves the clock on by as long as the loop would have waited for them."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The files that are ready now.

        Raises:
            StalledError: nothing is ready and nothing is scheduled.
        """
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StalledError("the simulation waits for something that nothing in it does.")
        self._clock.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop for simulations: `time()` begins at 0 and jumps to the next scheduled callback.

    Callbacks run in the order of their times; of one time, in an order that depends on the program alone. So
    a program without threads, files and chance of its own is deterministic.

    Raises (from running it):
        StalledError: all tasks wait, and nothing is scheduled.
    """

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(_JumpingSelector(self._virtual))
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual.now_s


def run_in_virtual_time(program: Coroutine[None, None, T]) -> T:
    """Run a program to its end in such a loop, and cancel what it leaves behind.

    Raises:
        StalledError: all tasks wait, and nothing is scheduled.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(program)


def now_s() -> float:
    """The time of the running loop (seconds)."""
    return asyncio.get_running_loop().time()
