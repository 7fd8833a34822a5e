"""What an evaluation says: one frozen noun, the same for people, for machines and for the run."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from agentrl.envs.scoring import ENV, UNUSABLE
from agentrl.rollout.chat.agent import COST, USAGE
from agentrl.types import JSON, Ending, Episode, Verdict

_TOOL_TIME = re.compile(r"tool/(.+)/us")
_TOOL_TOOK = re.compile(r"tool/(.+)/took/([^/]+)")
_TOOL_FAILED = re.compile(r"tool/(.+)/failed/([^/]+)")


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores of n episodes. Failed ones are counted by kind, and stand in no mean.

    stderr: standard error of the mean over the scored episodes.
    by: means by the environment's breakdown, e.g. {"hops=2": 0.97}.
    parts: means of the verdicts' parts; empty where the steps' own reward is the only one.
    turns, policy_tokens: means per scored episode. counts: sums over them.
    usage: tokens as a chat endpoint counts them, over all episodes: failed ones cost as much. cost: of these
        tokens, at the prices given; None = no prices.
    tool_ms: mean milliseconds of a call, by tool. tool_took: how many calls took how long, by tool and by the
        upper end of the bin. tool_failures: calls that failed their episode, by tool and kind.
    """

    env_id: str
    split: str
    temperature: float
    n: int
    mean: float
    stderr: float
    by: Mapping[str, float]
    parts: Mapping[str, float]
    failures: Mapping[str, int]
    endings: Mapping[str, int]
    counts: Mapping[str, int]
    usage: Mapping[str, int]
    cost: float | None
    tool_ms: Mapping[str, float]
    tool_took: Mapping[str, Mapping[str, int]]
    tool_failures: Mapping[str, Mapping[str, int]]
    turns: float
    policy_tokens: float
    seconds: float

    def as_json(self) -> dict[str, JSON]:
        """Plain values, in the order of the fields."""
        return asdict(self)


def policy_tokens_of(episode: Episode) -> int:
    """How many tokens the policy sampled in an episode, by its own count where it shows none."""
    told = episode.counts.get(f"{USAGE}completion_tokens", 0)
    return told + sum(len(t.tokens.completion.token_ids) for t in episode.turns if t.tokens is not None)


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """What was evaluated, as it stands in the report."""

    env_id: str
    split: str
    temperature: float
    breakdown: str | None


def summarize(
    episodes: Sequence[Episode], verdicts: Sequence[Verdict], setting: EvalSetting, *, seconds: float
) -> EvalReport:
    """Condense episodes (failed ones included) and the verdicts of the scored ones."""
    totals = {verdict.episode_id: verdict.total for verdict in verdicts}
    scored = [episode for episode in episodes if episode.id in totals]
    scores = [totals[episode.id] for episode in scored]
    by: defaultdict[str, list[float]] = defaultdict(list)
    if setting.breakdown is not None:
        for episode, score in zip(scored, scores, strict=True):
            value = episode.task.metadata.get(setting.breakdown)
            by[f"{setting.breakdown}={value}"].append(score)
    used = _used(episodes)
    return EvalReport(
        env_id=setting.env_id,
        split=setting.split,
        temperature=setting.temperature,
        n=len(scored),
        mean=_mean(scores),
        stderr=_standard_error(scores),
        by={key: _mean(by[key]) for key in sorted(by)},
        parts=part_means(verdicts),
        failures=_failures(episodes),
        endings=dict(Counter(str(episode.ending) for episode in episodes)),
        counts={name: n for name, n in total_counts(scored).items() if not name.startswith(USAGE)},
        usage={name: n for name, n in used.items() if name != COST},
        cost=used[COST] / 1e9 if COST in used else None,
        tool_ms=tool_ms(scored),
        tool_took=tool_took(scored),
        tool_failures=tool_failures(episodes),
        turns=_mean([len(episode.turns) for episode in scored]),
        policy_tokens=_mean([policy_tokens_of(episode) for episode in scored]),
        seconds=seconds,
    )


def part_means(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean of every part that a verdict has, by name; nothing where steps alone were rewarded.

    A part that not every verdict has (a step named it only where it applied) counts as 0 elsewhere.
    """
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    if names == [ENV]:
        return {}
    return {name: _mean([verdict.parts.get(name, 0.0) for verdict in verdicts]) for name in names}


def total_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """What happened how often, over all episodes."""
    return dict(_summed(episode.events for episode in episodes))


def _used(episodes: Sequence[Episode]) -> dict[str, int]:
    """What a chat endpoint says it took; the cost under its whole name."""
    total = _summed(episode.counts for episode in episodes)
    used = {name: count for name, count in total.items() if name.startswith(USAGE)}
    return {name if name == COST else name.removeprefix(USAGE): count for name, count in used.items()}


def tool_ms(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean milliseconds of a call that could be read, by tool."""
    total = _summed(episode.counts for episode in episodes)
    tools = [found[1] for name in sorted(total) if (found := _TOOL_TIME.fullmatch(name))]
    read = {tool: total[f"tool/{tool}/calls"] - total[f"tool/{tool}/malformed"] for tool in tools}
    return {tool: total[f"tool/{tool}/us"] / read[tool] / 1e3 for tool in tools}


def tool_took(episodes: Sequence[Episode]) -> dict[str, dict[str, int]]:
    """How many calls took how long: for each tool, by the upper end of the bin (`10ms`, ..., `more`)."""
    return _by_tool(_TOOL_TOOK, episodes)


def tool_failures(episodes: Sequence[Episode]) -> dict[str, dict[str, int]]:
    """How many calls failed their episode, by tool and kind (`unavailable`, `crashed`, ...)."""
    return _by_tool(_TOOL_FAILED, episodes)


def _by_tool(pattern: re.Pattern[str], episodes: Sequence[Episode]) -> dict[str, dict[str, int]]:
    tables: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, count in sorted(_summed(episode.counts for episode in episodes).items()):
        if (found := pattern.fullmatch(name)) is not None:
            tables[found[1]][found[2]] = count
    return dict(tables)


def _summed(several: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in several:
        total.update(counts)
    return total


def _failures(episodes: Sequence[Episode]) -> dict[str, int]:
    unusable = [episode for episode in episodes if episode.ending in UNUSABLE]
    return dict(Counter(e.failure.name if e.failure else str(Ending.ABORTED) for e in unusable))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
