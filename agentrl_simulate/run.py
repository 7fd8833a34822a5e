"""A simulated run: the producer, the staleness policy and the cadence of a run, over models of the rest.

real        Producer or OverSamplingProducer, StalenessPolicy, Places, Cadence, Publishing
models      SimulatedPlayer and SimulatedEngines in place of episodes, SimulatedTraining of the trainer
time        virtual (`VirtualTimeLoop`): hours take seconds
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from agentrl.assembly.rollout import Filters, build_producer, staleness_policy
from agentrl.data import Prompt
from agentrl.errors import ConfigError
from agentrl.rollout.cadence import Cadence, OwnDevices, Publishing, Times
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.producer import Producer
from agentrl.types import JSON, Group
from agentrl_simulate.config import SimulateSection
from agentrl_simulate.engine import SimulatedEngine, SimulatedEngines
from agentrl_simulate.player import TASK, SimulatedGroup, SimulatedPlayer, SimulatedWorkers
from agentrl_simulate.training import SharedDevices, SimulatedTraining
from agentrl_simulate.virtual_time import now_s, run_in_virtual_time
from agentrl_simulate.workload import Workload


class Totals(NamedTuple):
    """Counters so far: times of engines (a sum over them), trainer and workers (seconds), tokens (count)."""

    engine_s: float = 0.0
    request_s: float = 0.0
    trainer_s: float = 0.0
    worker_s: float = 0.0
    sampled: float = 0.0
    prefilled: float = 0.0


class SimulatedIteration(NamedTuple):
    """An iteration. times: of its phases. end_s: when the next one begins (seconds).

    staleness, oldest: of its trained tokens, the mean and the maximum (versions). num_tokens: that were
    trained on (count). totals: at its end.
    """

    times: Times
    end_s: float
    staleness: float
    oldest: int
    num_tokens: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulation measured.

    iterations: all of them. first, last: steady ones: from the end of number `first` to that of `last`,
    counted from 1. sizes: engines, GPUs and the like. groups: started, trained, in_flight (at the end), and
    dropped by reason (counts).
    """

    iterations: Sequence[SimulatedIteration]
    first: int
    last: int
    num_engines: int
    num_workers: int
    groups: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)

    @property
    def _steady(self) -> Sequence[SimulatedIteration]:
        return self.iterations[self.first : self.last]

    @property
    def seconds(self) -> float:
        """The time of the steady iterations (seconds)."""
        return self.iterations[self.last - 1].end_s - self.iterations[self.first - 1].end_s

    @property
    def steps_per_s(self) -> float:
        """Iterations a second."""
        return len(self._steady) / self.seconds

    @property
    def staleness(self) -> float:
        """The mean staleness of trained tokens over iterations (versions)."""
        return sum(each.staleness for each in self._steady) / len(self._steady)

    @property
    def oldest(self) -> int:
        """The largest staleness of a token in any iteration (versions)."""
        return max(each.oldest for each in self.iterations)

    @property
    def totals(self) -> Totals:
        """What the counters rose by in the steady iterations."""
        ends = (self.iterations[self.last - 1].totals, self.iterations[self.first - 1].totals)
        return Totals(*(after - before for after, before in zip(*ends, strict=True)))

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the steady iterations, by name; times of an iteration are means (seconds)."""
        totals, seconds, number = self.totals, self.seconds, len(self._steady)
        waits = [each.times.played - each.times.started for each in self._steady]
        return {
            "steps_per_s": self.steps_per_s,
            "step_s": seconds / number,
            "staleness_mean": self.staleness,
            "staleness_max": float(self.oldest),
            "engine_busy": totals.engine_s / self.num_engines / seconds,
            "trainer_busy": totals.trainer_s / seconds,
            "worker_busy": totals.worker_s / self.num_workers / seconds,
            "requests": totals.request_s / seconds,
            "wait_s": sum(waits) / number,
            "sampled_tok_per_s": totals.sampled / seconds,
            "prefilled_tok_per_s": totals.prefilled / seconds,
            "trained_tok_per_s": sum(each.num_tokens for each in self._steady) / seconds,
        }

    def as_json(self) -> dict[str, JSON]:
        """Plain values."""
        return {
            **self.figures,
            "iterations": len(self.iterations),
            "timed": [self.first, self.last],
            "groups": dict(self.groups),
            "events": dict(self.events),
        }


def simulate(
    rollout: RolloutConfig, section: SimulateSection, workload: Workload, *, passes: int = 1
) -> SimulatedRun:
    """Simulate a run of `section.iterations` iterations; equal arguments give an equal result.

    passes: over each batch (count).

    Raises:
        ConfigError: there are too few iterations for a steady one.
        WorldBrokenError, UserError: as of the producer of a real run.
    """
    rollout = rollout.model_copy(update={"num_rollout": section.iterations})
    first, last = steady(rollout)
    program = _Simulation(rollout, section, workload, passes).run()
    iterations, simulation = run_in_virtual_time(program)
    return SimulatedRun(
        *(iterations, first, last, section.num_engines, num_workers(rollout)),
        groups=simulation.groups,
        events=simulation.events,
    )


def steady(rollout: RolloutConfig) -> tuple[int, int]:
    """The steady iterations of a run: the ends of which two are the begin and the end, counted from 1.

    The first fill the places, in the last no further group starts.

    Raises:
        ConfigError: there is none.
    """
    ahead = rollout.max_staleness * rollout.update_weights_interval + 2
    first, last = ahead, rollout.num_rollout - ahead
    if last - first < 1:
        raise ConfigError(
            f"iterations ({rollout.num_rollout}) must be at least {2 * ahead + 1} here: {ahead} iterations "
            "at the begin and as many at the end are no steady ones; raise it."
        )
    return first, last


def num_workers(rollout: RolloutConfig) -> int:
    """Processes that play: the run's own, unless it has players (count)."""
    return max(1, rollout.num_rollout_workers)


def staleness_of(groups: Sequence[SimulatedGroup], version: int) -> tuple[float, int]:
    """Mean and maximum of how many versions older than `version` the sampled tokens are."""
    ages = [(version - of, number) for group in groups for of, number in group.sampled.items()]
    total = sum(number for _, number in ages)
    mean = sum(age * number for age, number in ages) / total if total else 0.0
    return mean, max((age for age, _ in ages), default=0)


class _Simulation:
    """The objects of one simulation, made on its event loop."""

    def __init__(
        self, rollout: RolloutConfig, section: SimulateSection, workload: Workload, passes: int
    ) -> None:
        self._rollout, self._section, self._workload, self._passes = rollout, section, workload, passes
        self.groups: dict[str, int] = {}
        self.events: dict[str, int] = {}

    async def run(self) -> tuple[list[SimulatedIteration], _Simulation]:
        """All iterations, and this with its counts."""
        section, rollout = self._section, self._rollout
        engines = SimulatedEngines([SimulatedEngine(section) for _ in range(section.num_engines)])
        workers = SimulatedWorkers(num_workers(rollout), section.turn_cpu_s)
        player = SimulatedPlayer(
            *(self._workload, engines, workers, section.request_s, rollout.max_episode_retries),
            timeout_s=rollout.group_timeout_s or float("inf"),
        )
        training = SimulatedTraining(
            section, engines, rollout.num_steps_per_rollout * self._passes, self._passes
        )
        prompts = (Prompt(index, TASK, 0) for index in count())
        filters = Filters(choose=None if rollout.buffer_filter_path is None else _any_groups)
        number = rollout.num_rollout
        producer = build_producer(rollout, prompts.__next__, player, filters, num_batches=number)
        turns = SharedDevices(engines, section.offload_s) if section.colocate else OwnDevices()
        cadence = Cadence(producer, Publishing.of(rollout), turns, now_s)
        try:
            iterations = await self._iterations(cadence, producer, training, workers)
        finally:
            in_flight = len(producer.pending)
            await producer.close()
        dropped = {f"dropped_{reason or 'broken'}": n for reason, n in training.num_dropped.items()}
        self.groups = {
            "started": player.started,
            "trained": training.num_trained,
            "in_flight": in_flight,
            **dropped,
        }
        self.events = {
            "retried_episodes": player.retried,
            "broken_groups": player.broken,
            "cut_episodes": player.cut,
            "staleness_bound": staleness_policy(rollout).bound,
        }
        return iterations, self

    async def _iterations(
        self, cadence: Cadence, producer: Producer, training: SimulatedTraining, workers: SimulatedWorkers
    ) -> list[SimulatedIteration]:
        iterations = []
        engines = training.engines
        for step in range(self._rollout.num_rollout):
            version = producer.version
            times, _ = await cadence.iterate(step, training)
            await asyncio.sleep(self._section.between_s)
            totals = Totals(
                engines.total(lambda engine: engine.busy_s),
                engines.total(lambda engine: engine.request_s),
                training.busy_s,
                workers.busy_s,
                engines.total(lambda engine: engine.num_sampled),
                engines.total(lambda engine: engine.num_prefilled),
            )
            mean, oldest = staleness_of(training.groups, version)
            num_tokens = sum(group.num_tokens for group in training.groups)
            iterations.append(SimulatedIteration(times, now_s(), mean, oldest, num_tokens, totals))
        return iterations


def _any_groups(groups: Sequence[Group], number: int) -> list[Group]:
    """A buffer filter that knows no rewards, and chooses by chance."""
    return random.Random(groups[0].id).sample(list(groups), number)
