"""What one iteration's episodes look like in numbers, under the field's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.evaluation.report import policy_tokens_of
from agentrl.rollout.group import GroupOutcome
from agentrl.types import Ending, Episode, Group


def rollout_metrics(outcomes: Sequence[GroupOutcome], dropped: Sequence[Group]) -> dict[str, float]:
    """Metrics of a batch of groups; `dropped` are those without signal.

    raw_reward is the mean verdict over whole groups, response_len/mean the policy's tokens
    per episode.
    """
    groups = [outcome.group for outcome in outcomes if outcome.group is not None]
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [verdict.total for group in groups for verdict in group.verdicts]
    failed = [episode for outcome in outcomes for episode in outcome.failed]
    metrics = {
        "rollout/raw_reward": _mean(rewards),
        "rollout/response_len/mean": _mean([policy_tokens_of(e) for e in episodes]),
        "rollout/turns/mean": _mean([len(e.turns) for e in episodes]),
        "rollout/truncated_ratio": _mean([float(e.ending is Ending.TRUNCATED) for e in episodes]),
        "rollout/zero_std/ratio": len(dropped) / max(len(groups), 1),
        "rollout/failed_episodes": float(len(failed)),
    }
    return metrics | _counts(episodes)


def _counts(episodes: Sequence[Episode]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for episode in episodes:
        total.update(episode.counts)
    return {f"rollout/{name}/mean": count / len(episodes) for name, count in sorted(total.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
