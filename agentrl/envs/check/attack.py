"""Tries to win an environment without solving it: a search over cheap strategies.

    search      every strategy plays two tasks; the better half goes on with twice as many, and so on
                (successive halving, arXiv:1502.07943), in half of the budget
    confirm     the best few play other tasks with the rest, so that luck in the search is no finding

What then earns more than `chance_score`, beyond its interval, is a way to be paid that training finds, too.
An episode that fails has no score; a strategy whose episodes all fail shows nothing of the reward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean

from agentrl.envs.base import Env
from agentrl.envs.check.arena import Arena
from agentrl.envs.check.intervals import ROUNDING, interval
from agentrl.envs.check.probes.score_probe import played
from agentrl.envs.check.probes.task_probe import TOLERANCE, Splits
from agentrl.envs.check.strategies import Strategy, strategies
from agentrl.envs.check.subject import CheckedEnv, chosen, named, seats, splits_of
from agentrl.envs.multi_agent import AnyEnv
from agentrl.errors import UserError
from agentrl.runtime.event_loop import blocking
from agentrl.runtime.interrupts import run_until_signal
from agentrl.runtime.stage import stage
from agentrl.types import JSON, Task

AttackProgress = Callable[[int, str], None]
"""Called with the episodes that were played since the last call (count), and what is played."""

_FIRST_TASKS = 2
_CONFIRMED = 5
_LEAST_CONFIRMING = 8
LEAST_BUDGET = 2 * _CONFIRMED * _LEAST_CONFIRMING
"""The least number of episodes of an attack (count)."""
_MOST_TASKS = 512


@dataclass(frozen=True, slots=True)
class TriedStrategy:
    """What a strategy earned on tasks that its choice had not seen.

    mean, low, high: of the scores, and their 99.9% interval. episodes: that were scored (count).
    paid: whether it earned more than the environment's `chance_score` allows.
    """

    strategy: str
    mean: float
    low: float
    high: float
    episodes: int
    paid: bool


@dataclass(frozen=True, slots=True)
class AttackReport:
    """What an attack found.

    attempts: the best strategies, the best first. tried: strategies in the search, of `strategies` (counts).
    episodes: that were played (count). chance_score, expert_score: as the environment declares them.
    failures: episodes that failed, which are in no mean (count). failed: the strategies whose episodes all
    failed. failure: one line with the first one; "" = none.
    """

    env_id: str
    seed: int
    attempts: tuple[TriedStrategy, ...]
    tried: int
    strategies: int
    episodes: int
    chance_score: float
    expert_score: float
    failures: int
    failed: tuple[str, ...]
    failure: str

    @property
    def paid(self) -> tuple[TriedStrategy, ...]:
        """The strategies that paid."""
        return tuple(attempt for attempt in self.attempts if attempt.paid)

    def to_json(self) -> dict[str, JSON]:
        """The report as JSON."""
        attempts: list[JSON] = [asdict(attempt) for attempt in self.attempts]
        return {**asdict(self), "attempts": attempts, "paid": len(self.paid), "failed": list(self.failed)}


@dataclass(frozen=True, slots=True)
class _Search:
    """The tasks of the search, others that confirm it, and the episodes that it may take (count).

    scores, failures: of all episodes so far, by strategy.
    """

    arena: Arena
    searched: tuple[Task, ...]
    confirming: tuple[Task, ...]
    budget: int
    progress: AttackProgress
    scores: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    async def play(self, strategy: Strategy, tasks: Sequence[Task], first: int) -> tuple[float, ...]:
        """The scores of a strategy's episodes that did not fail. first: as for `played`."""
        result = await played(self.arena, strategy.policy, tasks, first=first)
        self.scores.setdefault(strategy.name, []).extend(result.scores)
        self.failures.setdefault(strategy.name, []).extend(result.failures)
        return result.scores


def attack_env(
    env: CheckedEnv,
    *,
    env_kwargs: Mapping[str, object] | None = None,
    budget: int = 600,
    seed: int = 0,
    progress: AttackProgress | None = None,
) -> AttackReport:
    """Search for a strategy that is paid without solving the task, by playing at most `budget` episodes.

    env, env_kwargs: as for `check_env`; of several agents the first one attacks. budget: episodes (count).

    Raises:
        UnknownEnvError: no environment of that name.
        UserError: the budget is too small, there are no tasks, or see `check_env`.
    """
    if budget < LEAST_BUDGET:
        raise UserError(f"an attack plays at least {LEAST_BUDGET} episodes, got budget = {budget}; raise it.")
    name, make = named(env, env_kwargs or {})
    attacking = partial(_attack, name, make, budget, seed, progress or _silent)
    return blocking(lambda: run_until_signal(attacking()))


def _silent(played_now: int, what: str) -> None:
    del played_now, what


async def _attack(
    name: str, make: Callable[[], AnyEnv], budget: int, seed: int, progress: AttackProgress
) -> AttackReport:
    async with stage("make", None):
        given = make()
    seen = next(iter(seats(make, given).values()))
    async with stage("tasks", None):
        example = seen()
        splits = splits_of(example)
    tasks = chosen(splits, _MOST_TASKS, seed)
    if not tasks:
        raise UserError(f"{name} has no tasks to attack; name an environment with tasks.")
    every = list(strategies(await _after_reset(seen, tasks[0]), _training(splits)))
    # With few tasks the same ones confirm, in other worlds.
    half = len(tasks) // 2 if len(tasks) >= 2 * _FIRST_TASKS else 0
    arena = Arena(seen, example, tasks, seed)
    search = _Search(arena, tasks[half:], tasks[:half] or tasks, budget // 2, progress)
    best, spent = await _searched(search, every, random.Random(seed))
    attempts = await _confirmed(search, best, budget - spent)
    failures = [line for lines in search.failures.values() for line in lines]
    return AttackReport(
        name,
        seed,
        tuple(sorted(attempts, key=lambda attempt: -attempt.mean)),
        tried=len(search.scores),
        strategies=len(every),
        episodes=sum(map(len, search.scores.values())) + len(failures),
        chance_score=example.chance_score,
        expert_score=example.expert_score,
        failures=len(failures),
        failed=tuple(strategy for strategy, scores in search.scores.items() if not scores),
        failure=failures[0] if failures else "",
    )


async def _after_reset(make: Callable[[], Env], task: Task) -> Env:
    """An instance with the tools that its first task offers."""
    arena = Arena(make, make(), (task,), 0)
    instances: list[Env] = []

    def remember(env: Env, task: Task, rng: random.Random) -> list[str]:
        del task, rng
        instances.append(env)
        return [""]

    await arena.watch(remember, task)
    return instances[0] if instances else arena.example


def _training(splits: Splits) -> Sequence[Task]:
    """The tasks of the first split, whose answers a model could have learned."""
    return next((tasks for tasks in splits.values() if tasks), ())


async def _searched(search: _Search, every: list[Strategy], rng: random.Random) -> tuple[list[Strategy], int]:
    """The best strategies, and in how many episodes they were found."""
    tasks = _FIRST_TASKS if search.budget >= 2 * _FIRST_TASKS * len(every) else 1
    left = rng.sample(every, min(len(every), search.budget // tasks))
    spent, number = 0, 0
    while True:
        for strategy in left:
            chosen_tasks = [search.searched[(number + k) % len(search.searched)] for k in range(tasks)]
            await search.play(strategy, chosen_tasks, number)
            search.progress(tasks, f"search, {len(left)} strategies: {strategy.name}")
        spent, number = spent + tasks * len(left), number + tasks
        left.sort(key=lambda strategy: -_mean(search.scores[strategy.name]))
        left, tasks = left[: max(_CONFIRMED, len(left) // 2)], 2 * tasks
        if len(left) <= _CONFIRMED or spent + tasks * len(left) > search.budget:
            return left[:_CONFIRMED], spent


def _mean(scores: Sequence[float]) -> float:
    return fmean(scores) if scores else float("-inf")


async def _confirmed(search: _Search, best: Sequence[Strategy], budget: int) -> list[TriedStrategy]:
    """The best strategies on tasks, or in worlds, that the search has not seen."""
    each = max(_LEAST_CONFIRMING, budget // max(len(best), 1))
    each = min(each, max(_LEAST_CONFIRMING, 4 * len(search.confirming)))
    chance, expert = search.arena.example.chance_score, search.arena.example.expert_score
    allowed = chance + TOLERANCE * (expert - chance) + ROUNDING
    attempts = []
    for strategy in best:
        tasks = [search.confirming[k % len(search.confirming)] for k in range(each)]
        scores = await search.play(strategy, tasks, _MOST_TASKS)
        search.progress(each, f"confirm: {strategy.name}")
        if not scores:
            continue
        bounds = interval(scores, (chance, expert))
        attempts.append(TriedStrategy(strategy.name, *bounds, len(scores), bounds.low > allowed))
    return attempts
