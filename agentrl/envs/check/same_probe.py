"""Same task and seed, same episode: alone, again, and beside others; and nobody else's chance is touched."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Sequence

from agentrl.envs.check.arena import Arena, Policy, outcome
from agentrl.envs.check.report import Finding, Probed, error
from agentrl.types import Episode, Task

NUM_TASKS = 4


async def probe_sameness(arena: Arena, policies: Sequence[Policy]) -> Probed:
    """Each policy plays a few tasks twice, then all of them at once."""
    tasks = arena.some_tasks(NUM_TASKS)
    before = global_chance()
    alone = [await _played(arena, policy, task) for policy in policies for task in tasks]
    if global_chance() != before:
        text = "an episode draws from (or seeds) the global `random` or `numpy.random`; use self.rng alone."
        return Probed((error("global-random", text),))
    again = [await _played(arena, policy, task) for policy in policies for task in tasks]
    if differing := _difference(alone, again):
        text = f"the same task, seed and actions: {differing} the second time; take all chance from self.rng."
        return Probed((error("not-repeatable", text),))
    return Probed(tuple(await _interference(arena, policies, tasks, alone)))


async def _interference(
    arena: Arena, policies: Sequence[Policy], tasks: Sequence[Task], alone: Sequence[object]
) -> list[Finding]:
    """Siblings and strangers at the same time: each must see what it saw alone."""
    playing: list[Awaitable[object]] = [_played(arena, policy, task) for policy in policies for task in tasks]
    together = await asyncio.gather(*playing)
    if differing := _difference(alone, together):
        text = (
            f"with other episodes at the same time: {differing}; keep what belongs to an episode "
            "on its instance, so that all siblings share one world."
        )
        return [error("episodes-interfere", text)]
    return []


async def _played(arena: Arena, policy: Policy, task: Task) -> object:
    came = await outcome(arena.play(policy, task, seed=arena.seed))
    return came if isinstance(came, str) else _facts(came)


def _facts(episode: Episode) -> tuple[object, ...]:
    """All that must come again: what was seen and done, what it earned, what was counted, how it ended."""
    turns = tuple((tuple(turn.observation), repr(turn.action)) for turn in episode.turns)
    # repr: a NaN among a call's arguments equals nothing, not even itself.
    return (turns, episode.step_rewards, tuple(sorted(episode.events.items())), episode.ending)


_PARTS = ("what was seen and done", "the rewards", "the counts", "the ending")


def _difference(some: Sequence[object], others: Sequence[object]) -> str:
    """What differs first, or an empty string."""
    for one, other in zip(some, others, strict=True):
        if one == other:
            continue
        if isinstance(one, str) or isinstance(other, str):
            return f"{one if isinstance(one, str) else other}"
        return _differing_part(one, other)
    return ""


def _differing_part(one: object, other: object) -> str:
    assert isinstance(one, tuple)
    assert isinstance(other, tuple)
    names = [name for name, a, b in zip(_PARTS, one, other, strict=True) if a != b]
    return f"{names[0]} differed"


def global_chance() -> tuple[object, ...]:
    """The state of the generators that belong to everybody."""
    state: tuple[object, ...] = random.getstate()
    if "numpy" not in sys.modules:
        return state
    import numpy as np

    kind, keys, *rest = np.random.get_state(legacy=True)
    return (*state, kind, np.asarray(keys).tobytes(), *rest)
