"""Checks that an episode is its recorded actions and nothing else, and that scoring it again changes nothing.

An expert may reach into the world it plays, and a reward may depend on the clock or on a judge that samples:
then no model can earn what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.envs.check.arena import Arena, Policy
from agentrl.envs.check.findings import Finding, ProbeResult, error, warning
from agentrl.envs.check.probes.score_probe import PlayedEpisodes, played
from agentrl.envs.replay import replay_episode
from agentrl.envs.scoring import score
from agentrl.errors import StageError, UserError
from agentrl.types import Episode

_TASKS = 2
_SHOWN = 60


async def probe_replay(arena: Arena, policies: Sequence[Policy]) -> ProbeResult:
    """Play each policy on a few tasks, then its actions alone; and score the episodes twice."""
    findings: list[Finding] = []
    results = [await played(arena, policy, arena.some_tasks(_TASKS)) for policy in policies]
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
