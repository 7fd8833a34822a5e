"""Hints: what is often a fault, and costs an afternoon to find in a run.

    observation-cut      the model reads the beginning of something and never its end
    length-pays          of answers that say nothing, the longer (or the shorter) earns more
    never-full-marks     right answers, as the tasks have them, do not get the full score

All are warnings.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from agentrl.envs.base import Env, Script
from agentrl.envs.check.arena import Arena, Policy
from agentrl.envs.check.findings import Finding, ProbeResult, some, warning
from agentrl.envs.check.intervals import ROUNDING
from agentrl.envs.check.probes.score_probe import has_expert, played
from agentrl.envs.check.probes.task_probe import TOLERANCE
from agentrl.types import Episode, Message, Task, say

_LENGTHS = (1, 8, 64, 512)
"""Words of the answers that say nothing (count)."""
_TASKS = 4
_LONG = 200
"""An ellipsis at the end of fewer characters may be a manner of speaking."""
_CUT = re.compile(
    r"(?:\.\.\.|\N{HORIZONTAL ELLIPSIS}|\[(?:truncated|cut|snip)\w*\])[\s\"'`)\]]*\Z", re.IGNORECASE
)


async def probe_hints(arena: Arena, episodes: Sequence[Episode]) -> ProbeResult:
    """All hints. episodes: of the expert, or where there is none of random play."""
    findings = [*_cut(episodes), *await _lengths(arena), *await _full_marks(arena)]
    return ProbeResult(tuple(findings))


def _cut(episodes: Sequence[Episode]) -> list[Finding]:
    cut = [
        f"{episode.task.id} ({len(message.text):,} characters)"
        for episode in episodes
        for message in _observed(episode)
        if len(message.text) >= _LONG and _CUT.search(message.text)
    ]
    bounded = [episode for episode in episodes if any(stats.truncated for stats in episode.tools.values())]
    cut += [f"{episode.task.id} (by max_tool_chars)" for episode in bounded]
    if not cut:
        return []
    text = (
        f"an observation ends in an ellipsis, as one that is cut does: {some(list(dict.fromkeys(cut)))}; "
        "raise the limit, or let the model ask for the rest."
    )
    return [warning("observation-cut", text)]


def _observed(episode: Episode) -> list[Message]:
    return [message for turn in episode.turns for message in turn.observation]


async def _lengths(arena: Arena) -> list[Finding]:
    """Answers of nothing but one word, a few times over."""
    means: dict[int, float] = {}
    for length in _LENGTHS:
        result = await played(arena, _words(length), arena.some_tasks(_TASKS))
        if result.failures:
            return []
        means[length] = fmean(result.scores)
    spread = abs(means[_LENGTHS[-1]] - means[_LENGTHS[0]])
    span = arena.example.expert_score - arena.example.chance_score
    if not _is_monotone(list(means.values())) or spread <= TOLERANCE * span + ROUNDING:
        return []
    shown = ", ".join(f"{mean:.3f} for {length}" for length, mean in means.items())
    text = (
        f"answers that say nothing are paid by their words alone: {shown}; training learns the length first, "
        "so make sure that it is meant."
    )
    return [warning("length-pays", text)]


def _is_monotone(means: Sequence[float]) -> bool:
    steps = [after - before for before, after in pairwise(means)]
    return all(step > ROUNDING for step in steps) or all(step < -ROUNDING for step in steps)


def _words(length: int) -> Policy:
    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del env, task, rng
        while True:
            yield say(" ".join(["so"] * length))

    return policy


def _gold(env: Env, task: Task, rng: random.Random) -> Script:
    del env, rng
    while True:
        yield say(task.answer or "")


async def _full_marks(arena: Arena) -> list[Finding]:
    """The answers of the tasks, said as they are; of those that differ in their scores, the lower ones.

    Where an expert reaches its declared score, another way to say the answer may be the right one.
    """
    if not all(task.answer for task in arena.tasks):
        return []
    tasks = arena.tasks
    knows = await has_expert(arena)
    if knows and arena.example.expert_score >= 1.0:
        return []
    result = await played(arena, _gold, tasks)
    if result.failures or not result.scores:
        return []
    best, full = max(result.scores), max(arena.example.expert_score, *result.scores)
    paid = dict(zip((episode.task.id for episode in result.episodes), result.scores, strict=True))
    short = [id for id, earned in paid.items() if earned < full - ROUNDING]
    if not short or (knows and best <= arena.example.chance_score + ROUNDING):
        return []
    return [_unpaid(short, paid, full)]


def _unpaid(short: Sequence[str], paid: Mapping[str, float], full: float) -> Finding:
    text = (
        f"the answers of {len(short)} of {len(paid)} tasks, said as they are, do not earn {full:g}: "
        f"{some([f'{id} ({paid[id]:.3g})' for id in short])}; look at how the grader reads them."
    )
    return warning("never-full-marks", text)
