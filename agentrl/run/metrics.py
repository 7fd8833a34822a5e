"""Metrics of one iteration's episodes, under the field's names."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import PurePath
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.filters import has_signal
from agentrl.data.source import TOO_LONG
from agentrl.evaluation.report import (
    part_means,
    policy_tokens_of,
    total_counts,
    total_tools,
)
from agentrl.evaluation.statistics import SOLVED
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.over_sampling import NOT_CHOSEN, OVER_SAMPLED
from agentrl.types import Ending, Episode, Group, Restart, RolloutId, Verdict
from agentrl.types.statistics import SPECULATION

RAW_REWARD = "rollout/raw_reward"
_LAST_CHARS, _REPEATED = 10_000, 10
_ROW = re.compile(r"(?P<path>.+):\d+", re.DOTALL)
"""The id of a task of a file (`agentrl.data.FileSource`)."""


def rollout_metrics(
    outcomes: Sequence[GroupOutcome], removed: Mapping[RolloutId, str] = MappingProxyType({})
) -> dict[str, float]:
    """Metrics of a batch of groups. removed: rollouts that a filter took out of the loss, each with the
    reason.

    zero_std/ratio is the share of complete groups whose siblings all have equal rewards. raw_reward is the
    mean verdict of trained agents over complete groups (raw_reward/AGENT of each, where there are several),
    raw_reward_std their standard deviation, truncated_reward the mean over truncated episodes, greedy_reward
    that over episodes which are a greedy baseline (and in no other mean of rewards), no_room_ratio the share
    of episodes whose prompt is as long as an episode may be, where there are some, response_len/mean the
    policy's tokens per episode, reward/NAME/mean that of a part of the verdicts. Counts are means per
    episode; tool/NAME/latency_ms is the mean of a call, took/BIN the calls of such a duration,
    failed/KIND those that failed their episode. restarts/REASON counts trajectories that start a new prefix,
    reasoning_ratio is the share of turns with reasoning, repetition_ratio that of episodes in which the
    policy says the same over and over, pass@K that of groups of which one of K siblings is solved,
    cached_ratio that of prompt tokens which the engine had computed for the turn before.
    perf/request_time, queue_time, prefill_time and decode_time are means over the turns of what the engine
    took (seconds), as far as it says so, perf/request_time_max the longest.

    source/FILE/raw_reward and source/FILE/groups are of the prompts of one file, where there are several.

    prompts counts the groups that were started for the batch, dynamic_filter/drop_REASON those that the
    filter dropped, dropped/REASON those that an over-sampled batch left, sample_filter/drop_REASON rollouts.
    All that were complete are in all other metrics, so that these are of the policy and not of a filter.
    """
    groups = [outcome.group for outcome in outcomes if outcome.group is not None]
    episodes = [episode for group in groups for episode in group.episodes]
    verdicts = [verdict for group in groups for verdict in group.trained_verdicts]
    failed = [episode for outcome in outcomes for episode in outcome.failed]
    metrics = {
        RAW_REWARD: mean_score(outcomes),
        "rollout/raw_reward_std": _deviation([verdict.total for verdict in verdicts]),
        "rollout/response_len/mean": _mean([policy_tokens_of(e) for e in episodes]),
        "rollout/turns/mean": _mean([len(e.turns) for e in episodes]),
        "rollout/truncated_ratio": _mean([float(e.ending is Ending.TRUNCATED) for e in episodes]),
        "rollout/zero_std/ratio": _mean([float(_has_equal_rewards(group)) for group in groups]),
        "rollout/failed_episodes": float(len(failed)),
    }
    metrics |= _by_agent(verdicts) | _of_truncated(episodes, verdicts) | _of_greedy(groups)
    metrics |= _passed(groups) | _by_source(groups)
    metrics["rollout/repetition_ratio"] = _mean([float(_repeats(episode)) for episode in episodes])
    if share := _mean([float(_has_no_room(episode)) for episode in episodes]):
        metrics["rollout/no_room_ratio"] = share
    metrics |= {f"rollout/reward/{name}/mean": mean for name, mean in part_means(verdicts).items()}
    metrics["rollout/cached_ratio"] = cached_ratio(episodes)
    metrics |= _engine_times(episodes)
    metrics |= _dropped(outcomes, removed)
    return metrics | _counts(episodes) | _tools(episodes, failed) | _restarts(episodes)


def staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """How many versions older than `version`, which is served, the trainable tokens of the groups are.

    staleness/mean and staleness/max are over tokens. The mean is the sum of two: staleness/flight/mean up to
    the end of the token's group, and staleness/queue/mean from there to its training; 0 without tokens.
    staleness/flight/groups_VERSIONS and staleness/queue/groups_VERSIONS count groups by their oldest token.
    """
    staleness, flight = [np.zeros(0)], [np.zeros(0)]
    for group in groups:
        versions_N = _versions(group)
        staleness.append(version - versions_N)
        flight.append(_flight(group, versions_N))
    staleness_N, flight_N = np.concatenate(staleness), np.concatenate(flight)
    mean, in_flight = _mean(staleness_N.tolist()), _mean(flight_N.tolist())
    counts = zip(("flight", "queue"), staleness_counts(groups, version=version), strict=True)
    return {
        "rollout/staleness/mean": mean,
        "rollout/staleness/max": float(staleness_N.max(initial=0.0)),
        "rollout/staleness/flight/mean": in_flight,
        "rollout/staleness/queue/mean": mean - in_flight,
        **{
            f"rollout/staleness/{part}/groups_{versions}": float(number)
            for part, by_versions in counts
            for versions, number in sorted(by_versions.items())
        },
    }


def staleness_counts(groups: Sequence[Group], *, version: int) -> tuple[dict[int, int], dict[int, int]]:
    """How many of the groups (count) are how many versions older than `version`, by their oldest token.

    The first: up to the end of the group, in flight. The second: from there to its training, in the queue.
    """
    flight: Counter[int] = Counter()
    queue: Counter[int] = Counter()
    for group in groups:
        oldest = _versions(group).min(initial=version)
        in_flight = int(_flight(group, oldest))
        flight[in_flight] += 1
        queue[int(version - oldest) - in_flight] += 1
    return dict(flight), dict(queue)


def _flight(group: Group, versions_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How many versions older tokens of these versions were at the end of their group."""
    end = group.start_version if group.end_version is None else group.end_version
    # A version serves before the loop records it: a token may be newer than the end of its group.
    return np.maximum(end - versions_N, 0)


def _versions(group: Group) -> npt.NDArray[np.float64]:
    """The versions of the tokens of a group that are trained on."""
    trajectories = (trajectory for episode in group.episodes for trajectory in episode.trajectories)
    turns = (turn for trajectory in trajectories if trajectory.trainable for turn in trajectory.turns)
    versions = [turn.tokens.completion.versions for turn in turns if turn.tokens is not None]
    return np.concatenate([np.zeros(0), *versions])


def mean_score(outcomes: Sequence[GroupOutcome]) -> float:
    """The mean score of the policy over complete groups."""
    groups = [outcome.group for outcome in outcomes if outcome.group is not None]
    return _mean([verdict.total for group in groups for verdict in group.trained_verdicts])


def _dropped(outcomes: Sequence[GroupOutcome], removed: Mapping[RolloutId, str]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.reason in (OVER_SAMPLED, NOT_CHOSEN):
            counts[f"dropped/{outcome.reason}"] += 1
        elif outcome.reason:
            counts[f"dynamic_filter/drop_{outcome.reason}"] += 1
    counts.update(f"sample_filter/drop_{reason}" for reason in removed.values())
    metrics = {f"rollout/{name}": float(count) for name, count in counts.items()}
    return {"rollout/prompts": float(len(outcomes)), **metrics}


def skipped_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Skipped prompts of the data by reason (count); always with the entry for those that are too long."""
    by_reason = {TOO_LONG: 0, **counts}
    return {f"rollout/skipped/{reason}": float(count) for reason, count in by_reason.items()}


def engine_metrics(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, float]:
    """Events of the engine so far, and what came of the draft tokens since `before`, its counts of then.

    rollout/spec_accept_rate: accepted / proposed. rollout/spec_accept_length: tokens of a verifying pass, of
    which one is its own.
    """
    events = {f"engine/{name}": float(n) for name, n in counts.items() if name not in SPECULATION}
    proposed, accepted, verified = (counts.get(name, 0) - before.get(name, 0) for name in SPECULATION)
    if not (proposed and verified):
        return events
    lengths = {"rollout/spec_accept_length": 1 + accepted / verified}
    return {**events, "rollout/spec_accept_rate": accepted / proposed, **lengths}


def cached_ratio(episodes: Sequence[Episode]) -> float:
    """The share of all turns' prompt tokens that the engine took from its cache."""
    cached = prompts = 0
    for trajectory in (trajectory for episode in episodes for trajectory in episode.trajectories):
        prefix = 0
        for tokens in (turn.tokens for turn in trajectory.turns if turn.tokens is not None):
            prompts += prefix + len(tokens.world_ids)
            cached += tokens.completion.cached_tokens
            prefix += len(tokens.world_ids) + len(tokens.completion.token_ids)
    return cached / max(prompts, 1)


def _engine_times(episodes: Sequence[Episode]) -> dict[str, float]:
    times = [
        turn.tokens.completion.seconds
        for episode in episodes
        for trajectory in episode.trajectories
        for turn in trajectory.turns
        if trajectory.trainable and turn.tokens is not None
    ]
    by_name = {
        "perf/request_time": [each.request for each in times],
        "perf/queue_time": [each.queue for each in times],
        "perf/prefill_time": [each.prefill for each in times],
        "perf/decode_time": [each.decode for each in times],
    }
    known = {name: [s for s in seconds if s is not None] for name, seconds in by_name.items()}
    metrics = {name: _mean(seconds) for name, seconds in known.items() if seconds}
    if longest := max(known["perf/request_time"], default=0.0):
        metrics["perf/request_time_max"] = longest
    return metrics


def _by_agent(verdicts: Sequence[Verdict]) -> dict[str, float]:
    agents = sorted({verdict.agent for verdict in verdicts})
    if len(agents) < 2:
        return {}
    return {
        f"rollout/raw_reward/{name}": _mean([v.total for v in verdicts if v.agent == name]) for name in agents
    }


def _of_greedy(groups: Sequence[Group]) -> dict[str, float]:
    totals = [v.total for group in groups for episode in group.greedy for v in group.verdicts_of(episode)]
    return {"rollout/greedy_reward": _mean(totals)} if totals else {}


def _of_truncated(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> dict[str, float]:
    truncated = {episode.id for episode in episodes if episode.ending is Ending.TRUNCATED}
    totals = [verdict.total for verdict in verdicts if verdict.episode_id in truncated]
    return {"rollout/truncated_reward": _mean(totals)} if totals else {}


def _by_source(groups: Sequence[Group]) -> dict[str, float]:
    """Mean score and number of groups of each file of prompts, where a batch has prompts of several."""
    by_file: dict[str, list[Group]] = {}
    for group in groups:
        if (match := _ROW.fullmatch(group.task.id)) is not None:
            by_file.setdefault(PurePath(match["path"]).name.partition(".")[0], []).append(group)
    metrics: dict[str, float] = {}
    for name, own in by_file.items() if len(by_file) > 1 else ():
        totals = [verdict.total for group in own for verdict in group.trained_verdicts]
        metrics[f"rollout/source/{name}/raw_reward"] = _mean(totals)
        metrics[f"rollout/source/{name}/groups"] = float(len(own))
    return metrics


def _passed(groups: Sequence[Group]) -> dict[str, float]:
    """pass@K over the siblings of each trained role, for powers of two up to their number.

    The unbiased estimate; solved = a score of at least 1. Source: https://arxiv.org/abs/2107.03374.
    """
    compared = [group.without_greedy for group in groups]
    roles = [group.siblings(agent) for group in compared for agent in group.trained_agents]
    solved = [(len(role), sum(r.verdict.total >= SOLVED for r in role)) for role in roles]
    most = max((n for n, _ in solved), default=0)
    ks = {1 << power for power in range(1, most.bit_length())} | ({most} - {0, 1})
    return {
        f"rollout/pass@{k}": _mean([1.0 - comb(n - c, k) / comb(n, k) for n, c in solved if n >= k])
        for k in sorted(ks)
    }


def _repeats(episode: Episode) -> bool:
    """Whether the end of what the policy wrote in an episode shrinks to a tenth, and less, in zlib.

    It judges text: a model's tokens are few where its vocabulary is small. Source: the metric of that name in
    slime, which takes as many characters and the same bound.
    """
    parts = [
        part
        for trajectory in episode.trajectories
        if trajectory.trainable
        for turn in trajectory.turns
        for part in (turn.action.reasoning or "", turn.action.text, *(c.raw for c in turn.action.tool_calls))
    ]
    end = "".join(parts)[-_LAST_CHARS:].encode("utf-8", "surrogatepass")
    return bool(end) and len(zlib.compress(end, 1)) * _REPEATED < len(end)


def _has_no_room(episode: Episode) -> bool:
    """Whether the prompt of a trained agent left no room for a token of the policy."""
    most = episode.limits.max_tokens
    first = [each.turns[0].tokens for each in episode.trajectories if each.trainable and each.turns]
    return most is not None and any(tokens is not None and len(tokens.world_ids) >= most for tokens in first)


def _counts(episodes: Sequence[Episode]) -> dict[str, float]:
    counts = sorted(total_counts(episodes).items())
    return {f"rollout/{name}/mean": count / len(episodes) for name, count in counts}


def _tools(episodes: Sequence[Episode], failed: Sequence[Episode]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, stats in total_tools(episodes).items():
        if stats.latency_ms is not None:
            metrics[f"rollout/tool/{name}/latency_ms"] = stats.latency_ms
        metrics |= {f"rollout/tool/{name}/took/{bin}": float(n) for bin, n in stats.took.items()}
    for name, stats in total_tools(failed).items():
        metrics |= {f"rollout/tool/{name}/failed/{kind}": float(n) for kind, n in stats.failed.items()}
    return metrics


def _restarts(episodes: Sequence[Episode]) -> dict[str, float]:
    turns = [turn for episode in episodes for turn in episode.turns]
    reasons = [trajectory.reason for episode in episodes for trajectory in episode.trajectories]
    counts = {f"rollout/restarts/{reason.value}": float(reasons.count(reason)) for reason in Restart}
    return {
        **counts,
        "rollout/reasoning_ratio": _mean([float(t.action.reasoning is not None) for t in turns]),
    }


def _has_equal_rewards(group: Group) -> bool:
    return len(group.episodes) > 1 and not has_signal(group)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
