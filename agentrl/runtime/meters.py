"""How long something was in progress, and when: meters of a run, in bounded memory."""

from __future__ import annotations

from itertools import zip_longest
from time import perf_counter
from typing import Final, NamedTuple

MAX_BUCKETS: Final = 1_000
"""The buckets of a meter (count)."""
FINEST_S: Final = 0.01
"""The length of a bucket at the beginning (seconds)."""


class Meter:
    """The time in which at least one activity of a kind is in progress, and its course.

    active: those in progress (count). began_s: when the course begins (`time.perf_counter`).
    bucket_s: the length of a bucket of the course (seconds). It doubles whenever there would be more than
    `MAX_BUCKETS`, so the course has all of a run in bounded memory.
    """

    __slots__ = ("_buckets", "_busy_s", "_since_s", "active", "began_s", "bucket_s")

    def __init__(self, began_s: float = 0.0) -> None:
        self.active = 0
        self.began_s, self.bucket_s = began_s, FINEST_S
        self._busy_s = self._since_s = 0.0
        self._buckets: list[float] = []

    def begin(self) -> None:
        """Count one more."""
        if not self.active:
            self._since_s = perf_counter()
        self.active += 1

    def end(self) -> None:
        """Count one less."""
        self.active -= 1
        if not self.active:
            self._settle()

    def set_busy(self, is_busy: bool) -> None:
        """Count one, or none."""
        if is_busy != (self.active > 0):
            (self.begin if is_busy else self.end)()

    @property
    def busy_s(self) -> float:
        """Seconds so far in which one was in progress."""
        return self._busy_s + (perf_counter() - self._since_s if self.active else 0.0)

    @property
    def course(self) -> list[float]:
        """The busy seconds of each bucket, up to the last one that has any."""
        if self.active:
            self._settle()
        return list(self._buckets)

    def _settle(self) -> None:
        """Add the time since the first of those in progress began, or since it was added last."""
        start_s, self._since_s = self._since_s, perf_counter()
        self._busy_s += self._since_s - start_s
        end_s = self._since_s - self.began_s
        while end_s >= MAX_BUCKETS * self.bucket_s:
            pairs = zip_longest(self._buckets[::2], self._buckets[1::2], fillvalue=0.0)
            self._buckets = [first + second for first, second in pairs]
            self.bucket_s *= 2
        at_s = start_s - self.began_s
        last = int(end_s / self.bucket_s)
        self._buckets += [0.0] * (last + 1 - len(self._buckets))
        for index in range(int(at_s / self.bucket_s), last + 1):
            until_s = min((index + 1) * self.bucket_s, end_s)
            self._buckets[index] += max(until_s - at_s, 0.0)
            at_s = max(at_s, until_s)


class Busy(NamedTuple):
    """How long each side has worked, up to a moment (seconds).

    time_s: of `time.perf_counter`. engine_s: at least one request was at the engine, and it had its memory.
    trainer_s: a call of the trainer was in progress. both_s: both.
    """

    time_s: float = 0.0
    engine_s: float = 0.0
    trainer_s: float = 0.0
    both_s: float = 0.0

    def since(self, earlier: Busy) -> Busy:
        """The time between an earlier moment and this one."""
        return Busy(*(now - before for now, before in zip(self, earlier, strict=True)))
