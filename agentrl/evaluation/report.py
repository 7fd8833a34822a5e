"""What an evaluation says: one frozen noun, the same for people, for machines and for the run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agentrl.rollout.group import UNUSABLE
from agentrl.types import JSON, Ending, Episode, Verdict


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores of n episodes. Failed ones are counted by kind, and stand in no mean.

    stderr: standard error of the mean over the scored episodes.
    by: means by the environment's breakdown, e.g. {"hops=2": 0.97}.
    turns, policy_tokens: means per scored episode. counts: sums over them.
    """

    env_id: str
    split: str
    temperature: float
    n: int
    mean: float
    stderr: float
    by: Mapping[str, float]
    failures: Mapping[str, int]
    endings: Mapping[str, int]
    counts: Mapping[str, int]
    turns: float
    policy_tokens: float
    seconds: float

    def as_json(self) -> dict[str, JSON]:
        """Plain values, in the order of the fields."""
        return asdict(self)


def policy_tokens_of(episode: Episode) -> int:
    """How many tokens the policy sampled in an episode."""
    return sum(len(turn.tokens.completion.token_ids) for turn in episode.turns if turn.tokens is not None)


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
    parts: defaultdict[str, list[float]] = defaultdict(list)
    if setting.breakdown is not None:
        for episode, score in zip(scored, scores, strict=True):
            value = episode.task.metadata.get(setting.breakdown)
            parts[f"{setting.breakdown}={value}"].append(score)
    counts: Counter[str] = Counter()
    for episode in scored:
        counts.update(episode.counts)
    return EvalReport(
        env_id=setting.env_id,
        split=setting.split,
        temperature=setting.temperature,
        n=len(scored),
        mean=_mean(scores),
        stderr=_standard_error(scores),
        by={key: _mean(parts[key]) for key in sorted(parts)},
        failures=_failures(episodes),
        endings=dict(Counter(str(episode.ending) for episode in episodes)),
        counts=dict(counts),
        turns=_mean([len(episode.turns) for episode in scored]),
        policy_tokens=_mean([policy_tokens_of(episode) for episode in scored]),
        seconds=seconds,
    )


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
