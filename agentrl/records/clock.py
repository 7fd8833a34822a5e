"""Times of other processes, in the time of this one.

`time.perf_counter` is one clock for all processes of a machine; those of two machines differ by any number.
Each message of another process says when it was sent there, and nothing arrives before it is sent: so the
least difference between its arrival here and that is how the clocks differ, but for the quickest message's
time on the way.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

_NEWEST: Final = 240
"""Messages that are compared (count): clocks of two machines drift apart."""
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")


class Moment(NamedTuple):
    """A moment in some process. clock: of its machine. time_s: of `time.perf_counter` there (seconds)."""

    clock: str
    time_s: float


def now() -> Moment:
    """This moment in this process."""
    return Moment(_clock(), perf_counter())


class PeerClock:
    """The clock of one other process."""

    def __init__(self) -> None:
        self._differences = deque[float](maxlen=_NEWEST)

    def offset_s(self, sent: Moment) -> float:
        """What to add to times of the process, whose message of that moment has arrived now (seconds).

        0 on the same machine.
        """
        if sent.clock == _clock():
            return 0.0
        self._differences.append(perf_counter() - sent.time_s)
        return min(self._differences)


@cache
def _clock() -> str:
    """The clock of this machine: of this boot of it, and of this time namespace, where kernels have these."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    return f"{boot} {os.readlink(_NAMESPACE)}" if os.path.lexists(_NAMESPACE) else boot
