"""A weighted mixture of sources."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

from agentrl.data.source import DataSource, Skipped
from agentrl.errors import ConfigError
from agentrl.types import Task

_MAX_DENOMINATOR = 1000
_MAX_PERIOD = 100_000


class Mixture(DataSource):
    """Draws from several sources by a fixed, periodic schedule.

    Of the first n draws, n x w come from a source with the share w, rounded up or down. Each source has its
    own epochs; a small source begins its next epoch sooner.

    Raises:
        ConfigError: there is no source, or the weights have no schedule.
    """

    def __init__(self, sources: Sequence[DataSource], weights: Sequence[float], *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        if not sources:
            raise ConfigError("a mixture needs a source.")
        self._sources = tuple(sources)
        self._shares = integer_shares(weights)
        self._schedule = schedule(self._shares)
        counts = [0] * len(sources)
        self._earlier = []
        for number in self._schedule:
            self._earlier.append(counts[number])
            counts[number] += 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the fingerprints of the sources, and of their shares."""
        parts = [f"{source.fingerprint} {n}" for source, n in zip(self._sources, self._shares, strict=True)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number, from the source that the schedule has for it."""
        source, own = self.turn(ordinal)
        return self._sources[source].task(own)

    def turn(self, ordinal: int) -> tuple[int, int]:
        """The number of the source for an ordinal, and the ordinal within that source."""
        period, position = divmod(ordinal, len(self._schedule))
        source = self._schedule[position]
        return source, period * self._shares[source] + self._earlier[position]


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportion of the weights.

    Raises:
        ConfigError: a weight is not above 0, or the integers sum to more than 100,000.
    """
    fractions = [Fraction(weight).limit_denominator(_MAX_DENOMINATOR) for weight in weights]
    if any(fraction <= 0 for fraction in fractions):
        raise ConfigError(
            f"the weights {list(weights)} of prompt_data must be above .001; leave out what is not."
        )
    scale = lcm(*(fraction.denominator for fraction in fractions))
    counts = [int(fraction * scale) for fraction in fractions]
    shares = tuple(count // gcd(*counts) for count in counts)
    if sum(shares) > _MAX_PERIOD:
        raise ConfigError(
            f"the weights {list(weights)} of prompt_data are in the proportion of "
            f"{', '.join(map(str, shares))}, "
            "which is too fine for a schedule; round them."
        )
    return shares


def schedule(shares: Sequence[int]) -> tuple[int, ...]:
    """One period of the schedule: the number of the source at each position.

    Every source gets its share as evenly as integers allow: of the sources that are not ahead of their share,
    the one with the earliest deadline is next.
    """
    period = sum(shares)
    counts = [0] * len(shares)
    turns = []
    for position in range(period):
        deadlines = [
            (-(-(counts[k] + 1) * period // share), k)
            for k, share in enumerate(shares)
            if counts[k] * period < share * (position + 1)
        ]
        turn = min(deadlines)[1]
        counts[turn] += 1
        turns.append(turn)
    return tuple(turns)
