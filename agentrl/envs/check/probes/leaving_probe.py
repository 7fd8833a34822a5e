"""Checks that no episode pays more for being left than for being lost.

A policy leaves an episode by a turn that meets the limit of tokens: the world receives nothing, and the
episode is truncated with the rewards that it has so far. Where these are more than a loss earns, that is what
training learns: a policy that mostly loses gets a higher return from turns that never end.

    honest    plays to the end: at random, or as the expert of another task, whose answer has the right form
    lost      an honest episode whose score is in the lower half between chance_score and expert_score
    left      the same task, seed and actions, with a turn that does not end: the first one (never answer),
              or the one in the middle (stop early)

The lost and the left episode differ in nothing else, so the mean difference of their scores is what leaving
pays. Where at least four lost episodes were ended by the world, those that met a limit are left out: they
were left themselves.
"""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from agentrl.envs.check.arena import Arena, Policy
from agentrl.envs.check.findings import ProbeResult, error, some, some_failures
from agentrl.envs.check.intervals import ROUNDING, lowest_mean
from agentrl.envs.check.policies import misled, random_policy
from agentrl.envs.check.probes.score_probe import PlayedEpisodes, has_expert, played
from agentrl.envs.check.probes.task_probe import TOLERANCE
from agentrl.types import Ending

NEVER, EARLY = "never answer", "stop early"
RANDOM, MISLED = "random play", "an answer to another task"
_LEAST_PAIRS = 4


class _Pair(NamedTuple):
    """The scores of an episode that was lost, and of the same one left.

    by_the_world: whether the world ended the first; otherwise it met a limit.
    """

    lost: float
    left: float
    by_the_world: bool


class _Left(NamedTuple):
    """What one policy that leaves got in the episodes that an honest one lost; failures: one line each."""

    name: str
    honest: str
    played: list[_Pair]
    failures: list[str]

    @property
    def pairs(self) -> list[_Pair]:
        """The pairs to compare: where enough of the lost episodes were ended by the world, these."""
        ended = [pair for pair in self.played if pair.by_the_world]
        return ended if len(ended) >= _LEAST_PAIRS else self.played

    @property
    def gains(self) -> list[float]:
        """What leaving pays in each pair."""
        return [pair.left - pair.lost for pair in self.pairs]

    def pays(self, arena: Arena) -> bool:
        """Whether leaving pays more, on average, than the tolerance, which is that of all means."""
        if len(self.pairs) < _LEAST_PAIRS:
            return False
        span = arena.example.expert_score - arena.example.chance_score
        return lowest_mean(self.gains) > TOLERANCE * span + ROUNDING

    def __str__(self) -> str:
        left, lost = fmean(pair.left for pair in self.pairs), fmean(pair.lost for pair in self.pairs)
        return f"{self.name} ({left:.3f}, while {self.honest} that loses gets {lost:.3f})"


async def probe_leaving(arena: Arena, n: int) -> ProbeResult:
    """Compare lost episodes with the same ones left, over `n` tasks and half as many of the expert's."""
    played_left = await _left(arena, RANDOM, random_policy, n)
    if len(arena.tasks) > 1 and await has_expert(arena):
        played_left += await _left(arena, MISLED, misled(arena.tasks), max(_LEAST_PAIRS, n // 2))
    findings = []
    if failures := [f"{left.name}: {line}" for left in played_left for line in left.failures]:
        text = (
            f"an unfinished episode cannot be scored: {some_failures(failures)}; score it, whatever it holds."
        )
        findings.append(error("crash", text))
    if paying := [str(left) for left in played_left if left.pays(arena)]:
        text = (
            f"a turn that never ends pays more than losing: {some(paying)}. Make a loss worth as much: pay "
            "once, at the end, from 0; or add a `Reward` that charges truncated episodes for it."
        )
        findings.append(error("leaving-pays", text))
    gains = [fmean(left.gains) for left in played_left if left.played]
    return ProbeResult(tuple(findings), {"leaving_gain": max(gains)} if gains else None)


async def _left(arena: Arena, honest: str, policy: Policy, n: int) -> list[_Left]:
    """Play `n` tasks honestly, and those that are lost again, leaving them."""
    results = {name: _Left(name, honest, [], []) for name in (NEVER, EARLY)}
    for number, task in enumerate(arena.some_tasks(n)):
        to_the_end = await played(arena, policy, [task], first=number)
        if not to_the_end.scores or not _is_lost(arena, to_the_end.scores[0]):
            continue
        by_the_world = to_the_end.episodes[0].ending is Ending.COMPLETED
        for name, turn in _turns(to_the_end).items():
            left = await played(arena, policy, [task], first=number, leaves_at=turn)
            results[name].failures.extend(left.failures)
            results[name].played.extend(
                _Pair(to_the_end.scores[0], score, by_the_world) for score in left.scores
            )
    return list(results.values())


def _is_lost(arena: Arena, score: float) -> bool:
    return score < (arena.example.chance_score + arena.example.expert_score) / 2


def _turns(to_the_end: PlayedEpisodes) -> dict[str, int]:
    """The turn that is not finished, by the name of the policy; the middle one where there are several."""
    turns = len(to_the_end.episodes[0].turns)
    return {NEVER: 0} | ({EARLY: turns // 2} if turns > 1 else {})
