"""Many simulations: splits of GPUs between playing and training, values of max_staleness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from agentrl.errors import ConfigError, UserError
from agentrl.rollout.config import RolloutConfig
from agentrl.types import JSON
from agentrl_simulate.config import SimulateSection
from agentrl_simulate.run import SimulatedRun, simulate
from agentrl_simulate.workload import Workload

_SHARES = 8
"""Splits give playing 1/8, 2/8, ... of the GPUs; around the best of them, sixteenths (count)."""


class SweepSizes(NamedTuple):
    """GPUs that play and GPUs that train (counts). colocate: all of them do both, in turns."""

    rollout_gpus: int
    train_gpus: int
    colocate: bool = False

    def __str__(self) -> str:
        return "in turns" if self.colocate else f"{self.rollout_gpus} + {self.train_gpus}"


class SweepRow(NamedTuple):
    """A simulation. run: None = it ended early, and `problem` says why."""

    sizes: SweepSizes
    max_staleness: int
    run: SimulatedRun | None
    problem: str = ""

    @property
    def steps_per_s(self) -> float:
        """Iterations a second; 0 of a run that ended early."""
        return 0.0 if self.run is None else self.run.steps_per_s

    def as_json(self) -> dict[str, JSON]:
        """Plain values."""
        measured: dict[str, JSON] = {"problem": self.problem} if self.run is None else self.run.as_json()
        return {
            "rollout_gpus": self.sizes.rollout_gpus,
            "train_gpus": self.sizes.train_gpus,
            "colocate": self.sizes.colocate,
            "max_staleness": self.max_staleness,
            **measured,
        }


class Sweep(NamedTuple):
    """What all simulations of a sweep have in common.

    passes: over each batch (count). sources: of values of the section that are predicted, by what, by their
    names. on_row: called with each result; None = it is not.
    """

    rollout: RolloutConfig
    section: SimulateSection
    workload: Workload
    passes: int = 1
    sources: Mapping[str, str] = MappingProxyType({})
    on_row: Callable[[SweepRow], None] | None = None

    def row(self, sizes: SweepSizes, max_staleness: int) -> SweepRow:
        """One simulation."""
        section = self.section.model_copy(update=sizes._asdict())
        rollout = self.rollout.model_copy(update={"max_staleness": max_staleness})
        try:
            row = SweepRow(
                sizes, max_staleness, simulate(rollout, section, self.workload, passes=self.passes)
            )
        except ConfigError:
            raise
        except UserError as error:
            row = SweepRow(sizes, max_staleness, None, str(error))
        if self.on_row is not None:
            self.on_row(row)
        return row

    def over_staleness(self, values: Sequence[int]) -> list[SweepRow]:
        """One simulation for each value of max_staleness, with the sizes of the section."""
        section = self.section
        sizes = SweepSizes(section.playing_gpus, section.train_gpus, section.colocate)
        return [self.row(sizes, value) for value in values]

    def over_splits(self, gpus: int, values: Sequence[int]) -> list[SweepRow]:
        """Splits of so many GPUs, for each value of max_staleness.

        At 0 engine and trainer wait for each other anyway, so there they take turns on all GPUs, too.

        Raises:
            ConfigError: there are too few GPUs for an engine and a trainer.
        """
        rows: list[SweepRow] = []
        for value in values:
            own = [self.row(sizes, value) for sizes in _splits(gpus, self.section.engine_gpus)]
            best = max(own, key=lambda row: row.steps_per_s)
            known = {row.sizes for row in own}
            around = [
                sizes for sizes in _around(best.sizes, gpus, self.section.engine_gpus) if sizes not in known
            ]
            own += [self.row(sizes, value) for sizes in around]
            if value == 0:
                own.append(self.row(SweepSizes(gpus - 1, 1, colocate=True), value))
            rows += sorted(own, key=lambda row: (row.sizes.colocate, row.sizes.rollout_gpus))
        return rows


def best_of(rows: Sequence[SweepRow]) -> SweepRow | None:
    """The fastest one; None = none came to its end."""
    best = max(rows, key=lambda row: row.steps_per_s, default=None)
    return None if best is None or best.run is None else best


def _splits(gpus: int, engine_gpus: int) -> list[SweepSizes]:
    shares = (gpus * share / _SHARES for share in range(1, _SHARES))
    sizes = sorted({_whole(share, gpus, engine_gpus) for share in shares})
    if gpus <= engine_gpus or not sizes:
        raise ConfigError(
            f"gpus ({gpus}) must be more than engine_gpus ({engine_gpus}): one engine plays, and at least "
            "one GPU trains; raise it."
        )
    return [SweepSizes(playing, gpus - playing) for playing in sizes]


def _around(best: SweepSizes, gpus: int, engine_gpus: int) -> Iterator[SweepSizes]:
    for offset in (-0.5, 0.5):
        playing = _whole(best.rollout_gpus + offset * gpus / _SHARES, gpus, engine_gpus)
        yield SweepSizes(playing, gpus - playing)


def _whole(playing: float, gpus: int, engine_gpus: int) -> int:
    """The nearest number of GPUs that are whole engines, and leave one for the trainer."""
    most = (gpus - 1) // engine_gpus
    return min(max(round(playing / engine_gpus), 1), most) * engine_gpus
