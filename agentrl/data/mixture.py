"""Several sources in one, each with its share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

from agentrl.data.source import DataSource, Skipped
from agentrl.errors import ConfigError
from agentrl.types import Task

_FINEST = 1000
_LONGEST = 100_000


class Mixture(DataSource):
    """Draws from several sources by a fixed schedule, which repeats itself.

    Of the first n draws, a source with the share w has had n x w, rounded up or down. Each source goes
    through its own epochs; one that is small begins again sooner.

    Raises:
        ConfigError: there is no source, or the weights have no schedule.
    """

    def __init__(self, sources: Sequence[DataSource], weights: Sequence[float], *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        if not sources:
            raise ConfigError("a mixture needs a source.")
        self._sources = tuple(sources)
        self._shares = whole_shares(weights)
        self._schedule = schedule(self._shares)
        counts = [0] * len(sources)
        self._earlier = []
        for number in self._schedule:
            self._earlier.append(counts[number])
            counts[number] += 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of those of the sources, and of their shares."""
        parts = [f"{one.fingerprint} {n}" for one, n in zip(self._sources, self._shares, strict=True)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number, by the source whose turn it is."""
        source, own = self.turn(ordinal)
        return self._sources[source].task(own)

    def turn(self, ordinal: int) -> tuple[int, int]:
        """Which source is drawn from, and which of its own draws that is."""
        period, place = divmod(ordinal, len(self._schedule))
        source = self._schedule[place]
        return source, period * self._shares[source] + self._earlier[place]


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of the weights.

    Raises:
        ConfigError: a weight is not above 0, or there are no such numbers within reason.
    """
    exact = [Fraction(weight).limit_denominator(_FINEST) for weight in weights]
    if any(one <= 0 for one in exact):
        raise ConfigError(
            f"the weights {list(weights)} of prompt_data must be above .001; leave out what is not."
        )
    scale = lcm(*(one.denominator for one in exact))
    counts = [int(one * scale) for one in exact]
    shares = tuple(count // gcd(*counts) for count in counts)
    if sum(shares) > _LONGEST:
        raise ConfigError(
            f"the weights {list(weights)} of prompt_data are in the proportion of "
            f"{', '.join(map(str, shares))}, "
            "which is too fine for a schedule; round them."
        )
    return shares


def schedule(shares: Sequence[int]) -> tuple[int, ...]:
    """One period of turns, in which every source gets its share as evenly as whole turns allow.

    Of those that have not yet had more than their share, the one takes its turn that must soonest.
    """
    period = sum(shares)
    counts = [0] * len(shares)
    turns = []
    for place in range(period):
        due = [
            (-(-(counts[k] + 1) * period // share), k)
            for k, share in enumerate(shares)
            if counts[k] * period < share * (place + 1)
        ]
        turn = min(due)[1]
        counts[turn] += 1
        turns.append(turn)
    return tuple(turns)
