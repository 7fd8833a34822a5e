"""Checks that a task and a seed always give the same episode: alone, again, and concurrently.

Episodes must not touch the global random generators either. And an episode is its recorded actions and
nothing else: an expert may reach into the world it plays, and a reward may depend on the clock or on a judge
that samples. Then no model can earn what was measured.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager

from agentrl.envs.check.arena import Arena, Policy, outcome
from agentrl.envs.check.findings import Finding, ProbeResult, error, warning
from agentrl.envs.check.probes.score_probe import PlayedEpisodes, played
from agentrl.envs.replay import replay_episode
from agentrl.envs.scoring import score
from agentrl.errors import StageError, UserError
from agentrl.types import Episode, Task

NUM_TASKS = 4
_REPLAYED = 2
_SHOWN = 60


async def probe_sameness(arena: Arena, policies: Sequence[Policy]) -> ProbeResult:
    """Each policy plays a few tasks twice, then all of them at once."""
    tasks = arena.some_tasks(NUM_TASKS)
    with _moved_on():
        before = global_random_state()
        first = [await _played(arena, policy, task) for policy in policies for task in tasks]
        touched = global_random_state() != before
    if touched:
        text = "an episode draws from (or seeds) the global `random` or `numpy.random`; use self.rng alone."
        return ProbeResult((error("global-random", text),))
    again = [await _played(arena, policy, task) for policy in policies for task in tasks]
    if differing := _difference(first, again):
        text = f"the same task, seed and actions: {differing} the second time; take all chance from self.rng."
        return ProbeResult((error("not-repeatable", text),))
    findings = tuple(await _interference(arena, policies, tasks, first))
    return ProbeResult(findings, {"other_seed_differs": await _seed_acts(arena, policies[-1], tasks, first)})


async def _seed_acts(arena: Arena, policy: Policy, tasks: Sequence[Task], first: Sequence[object]) -> float:
    """The share of tasks whose episode differs under another seed. first: ends with those of `policy`."""
    other = [await _played(arena, policy, task, seed=arena.seed + 1) for task in tasks]
    before = first[len(first) - len(tasks) :]
    return sum(a != b for a, b in zip(before, other, strict=True)) / len(tasks)


async def _interference(
    arena: Arena, policies: Sequence[Policy], tasks: Sequence[Task], first: Sequence[object]
) -> list[Finding]:
    """Play all episodes concurrently: each must be the same as without the others."""
    playing: list[Awaitable[object]] = [_played(arena, policy, task) for policy in policies for task in tasks]
    concurrent = await asyncio.gather(*playing)
    if differing := _difference(first, concurrent):
        text = (
            f"with other episodes at the same time: {differing}; keep what belongs to an episode "
            "on its instance, so that all siblings share one world."
        )
        return [error("episodes-interfere", text)]
    return []


async def _played(arena: Arena, policy: Policy, task: Task, seed: int | None = None) -> object:
    result = await outcome(arena.play(policy, task, seed=arena.seed if seed is None else seed))
    return result if isinstance(result, str) else _comparable(result)


def _comparable(episode: Episode) -> tuple[object, ...]:
    """The parts that must be equal: turns, rewards, counts and ending, as in _PARTS."""
    turns = tuple((tuple(turn.observation), repr(turn.action)) for turn in episode.turns)
    # repr: a NaN among a call's arguments equals nothing, not even itself.
    return (turns, episode.step_rewards, tuple(sorted(episode.events.items())), episode.ending)


_PARTS = ("what was seen and done", "the rewards", "the counts", "the ending")


def _difference(left: Sequence[object], right: Sequence[object]) -> str:
    """The first difference, or an empty string."""
    for a, b in zip(left, right, strict=True):
        if a == b:
            continue
        if isinstance(a, str) or isinstance(b, str):
            return f"{a if isinstance(a, str) else b}"
        return _differing_part(a, b)
    return ""


def _differing_part(left: object, right: object) -> str:
    assert isinstance(left, tuple)
    assert isinstance(right, tuple)
    names = [name for name, a, b in zip(_PARTS, left, right, strict=True) if a != b]
    return f"{names[0]} differed"


@contextmanager
def _moved_on() -> Iterator[None]:
    """The global generators in a state that no seed of an episode before gives; afterwards as they were."""
    state = random.getstate()
    random.random()
    try:
        if "numpy" not in sys.modules:
            yield
            return
        import numpy as np

        of_numpy = np.random.get_state(legacy=True)
        np.random.random()
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
    finally:
        random.setstate(state)


def global_random_state() -> tuple[object, ...]:
    """The state of the global generators of `random` and numpy."""
    state: tuple[object, ...] = random.getstate()
    if "numpy" not in sys.modules:
        return state
    import numpy as np

    kind, keys, *rest = np.random.get_state(legacy=True)
    return (*state, kind, np.asarray(keys).tobytes(), *rest)


async def probe_replay(arena: Arena, policies: Sequence[Policy]) -> ProbeResult:
    """Play each policy on a few tasks, then its actions alone; and score the episodes twice."""
    findings: list[Finding] = []
    results = [await played(arena, policy, arena.some_tasks(_REPLAYED)) for policy in policies]
    for episode in (episode for result in results for episode in result.episodes):
        if problem := await _replayed(arena, episode):
            text = (
                f"{episode.task.id}: the recorded actions give something else in a new instance: {problem}. "
                "What a policy does must reach the world by its messages alone."
            )
            findings.append(error("not-replayable", text))
            break
    for result in results:
        findings += await _scored_again(arena, result)
    return ProbeResult(tuple(findings[:1]))


async def _scored_again(arena: Arena, result: PlayedEpisodes) -> list[Finding]:
    """Of one policy: episodes of two may have the same id, by which verdicts are told apart."""
    again = [verdict.total for verdict in (await score(result.episodes, arena.example.rewards)).verdicts]
    differing = [(a, b) for a, b in zip(result.scores, again, strict=False) if a != b]
    if not differing:
        return []
    old, new = differing[0]
    text = f"the same episode is scored {old:g} and then {new:g}; a reward may depend on the episode alone."
    return [warning("scores-differ", text)]


async def _replayed(arena: Arena, episode: Episode) -> str:
    """The first difference, or nothing."""
    try:
        differences = await replay_episode(arena.make(), episode)
    except (StageError, UserError) as wrong:
        return str(wrong)
    if not differences:
        return ""
    first = differences[0]
    where = f"in turn {first.turn}, " if first.turn is not None else ""
    return f"{where}the {first.what} is {first.actual[:_SHOWN]!r}, not {first.expected[:_SHOWN]!r}"
