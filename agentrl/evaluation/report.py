"""The report of an evaluation, for the terminal, for files and for the metrics of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

import numpy as np

from agentrl.envs.scoring import ENV, UNUSABLE
from agentrl.evaluation.statistics import Estimate, ks_of, mean_of, num_solved, pass_at_k, pooled, units_of
from agentrl.types import JSON, Ending, Episode, ToolStats, Usage, Verdict, summed
from agentrl.view.result import ShownResult

_NO_SCORE = Estimate(0.0, 0.0, 0.0, "wilson")


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores of n episodes. Failed ones are counted by kind, and are in no mean.

    low, high: the 95% interval of the mean, over tasks: episodes of one task in one world are not independent
        (`statistics` has the methods).
    by: means by the environment's breakdown, e.g. {"hops=2": 0.97}.
    parts: means of the verdicts' parts; empty where the steps' own reward is the only one.
    turns, policy_tokens: means per scored episode. counts: sums over them.
    seconds: wall time of playing; of an evaluation that was resumed, of all its attempts.
    usage: tokens as a chat endpoint counts them, over all episodes: failed ones cost as much. cost: of these
        tokens, at the configured prices; None = no prices.
    tool_ms: mean milliseconds of a call, by tool. tool_took: numbers of calls by tool and by the upper end of
        the latency bin. tool_failures: calls that failed their episode, by tool and kind.
    tasks: different ones that were scored (count). samples: most episodes of one task in one world. pass_at:
        pass@k by k, over the tasks with as many scored episodes; empty where tasks are played once.
    sets: the reports of named sets of prompts; this one is then over all of them.
    difference: of a set that was played once more in another way, the mean difference of its scores to those
        of the same episodes as they are.
    spent: where sets were played once more, the requests to an endpoint, its tokens and their cost, over all
        that was played.
    versions: shares of the policy's tokens by the version of the weights, oldest first; empty where an
        endpoint samples.
    """

    env_id: str
    split: str
    temperature: float
    n: int
    mean: float
    low: float
    high: float
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
    tasks: int = 0
    samples: int = 1
    pass_at: Mapping[str, float] = field(default_factory=dict)
    sets: Mapping[str, EvalReport] = field(default_factory=dict)
    versions: Mapping[str, float] = field(default_factory=dict)
    difference: Estimate | None = None
    spent: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, JSON]:
        """Plain values, in the order of the fields."""
        sets: dict[str, JSON] = {name: report.as_json() for name, report in self.sets.items()}
        difference = None if self.difference is None else self.difference._asdict()
        return {**asdict(self), "sets": sets, "difference": difference}

    @property
    def title(self) -> str:
        """The environment, the split and the temperature."""
        return f"{self.env_id} ({self.split}), temperature {self.temperature:g}"

    def scores(self) -> dict[str, str]:
        """The mean with its 95% interval, pass@k, and the means of sets of prompts and of the breakdown."""
        mean = {"mean": f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"}
        if (change := self.difference) is not None:
            mean["difference"] = f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
        passed = {f"pass@{k}": f"{value:.3f}" for k, value in self.pass_at.items()}
        sets = {
            f"{label}, {name}": text
            for name, part in self.sets.items()
            for label, text in part.scores().items()
            if "," not in label
        }
        return {
            **mean,
            **passed,
            **sets,
            **{f"mean, {name}": f"{value:.3f}" for name, value in self.by.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """The report as names and values, for people."""
        failed = sum(self.failures.values())
        rows = {**self.scores(), **{f"reward, {name}": f"{value:.3f}" for name, value in self.parts.items()}}
        rows |= {"episodes scored": str(self.n), "episodes failed": str(failed), "tasks": str(self.tasks)}
        rows |= {f"failed: {kind}": str(count) for kind, count in self.failures.items()}
        rows |= {
            "turns per episode": f"{self.turns:.2f}",
            "model tokens per episode": f"{self.policy_tokens:.1f}",
        }
        rows |= {name.replace("_", " "): str(count) for name, count in self.usage.items()}
        if self.cost is not None:
            rows |= {
                "cost, all episodes": f"{self.cost:.4f}",
                "cost per episode": f"{self.cost / (self.n + failed):.6f}",
            }
        for name, value in self.spent.items():
            label = f"{name.replace('_', ' ')}, broken tools included"
            rows[label] = f"{value:.4f}" if name == "cost" else f"{value:.0f}"
        rows |= {name.replace("/", ", ").replace("_", " "): str(count) for name, count in self.counts.items()}
        rows |= {f"tool, {name}, ms per call": f"{ms:.2f}" for name, ms in self.tool_ms.items()}
        if len(self.versions) > 1:
            rows |= {f"tokens of version {name}": f"{share:.1%}" for name, share in self.versions.items()}
        return [*rows.items(), ("seconds", f"{self.seconds:.1f}")]

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""
        return ShownResult(self.title, lines=[(name, (value,)) for name, value in self.rows()]).html()


def policy_tokens_of(episode: Episode) -> int:
    """The number of tokens that the policy sampled in an episode, or that its endpoint counted."""
    counted = 0 if episode.usage is None else episode.usage.completion_tokens
    trainable = (trajectory for trajectory in episode.trajectories if trajectory.trainable)
    tokens = [turn.tokens for trajectory in trainable for turn in trajectory.turns]
    return counted + sum(len(turn.completion.token_ids) for turn in tokens if turn is not None)


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """The evaluated environment and the settings, as the report shows them."""

    env_id: str
    split: str
    temperature: float
    breakdown: str | None


def summarize(
    episodes: Sequence[Episode], verdicts: Sequence[Verdict], setting: EvalSetting, *, seconds: float
) -> EvalReport:
    """Summarize episodes (failed ones included) and the verdicts of the scored ones.

    Where an episode has several agents, its score is the mean over those that the policy played, and `by`
    holds the mean of each.
    """
    counted = _of_policy(episodes, verdicts)
    score_of = scores_of(episodes, counted)
    scored = [episode for episode in episodes if episode.id in score_of]
    scores = [score_of[episode.id] for episode in scored]
    usage = _usage_of(episodes)
    tools = total_tools(scored)
    units = scores_by_unit(scored, score_of)
    samples = max(Counter((episode.task.id, episode.seed) for episode in episodes).values(), default=1)
    mean = mean_of([*pooled(units).values()]) or _NO_SCORE
    return EvalReport(
        env_id=setting.env_id,
        split=setting.split,
        temperature=setting.temperature,
        n=len(scored),
        mean=mean.value,
        low=mean.low,
        high=mean.high,
        by=_by_metadata(scored, scores, setting.breakdown) | _by_agent(counted),
        parts=part_means(counted),
        failures=_failures(episodes),
        endings=dict(Counter(str(episode.ending) for episode in episodes)),
        counts=total_counts(scored),
        usage={} if usage is None else _tokens_used(usage),
        cost=None if usage is None else usage.cost,
        tool_ms={name: ms for name, stats in tools.items() if (ms := stats.latency_ms) is not None},
        tool_took={name: stats.took for name, stats in tools.items() if stats.took},
        tool_failures={name: s.failed for name, s in total_tools(episodes).items() if s.failed},
        turns=_mean([len(episode.turns) for episode in scored]),
        policy_tokens=_mean([policy_tokens_of(episode) for episode in scored]),
        seconds=seconds,
        tasks=len({episode.task.id for episode in scored}),
        samples=samples,
        pass_at=_pass_at([scores for prompts in units.values() for scores in prompts.values()], samples),
        versions=version_shares(scored),
    )


def scores_of(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The score of each scored episode by its id: the mean over the agents that the policy played."""
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in _of_policy(episodes, verdicts):
        totals[verdict.episode_id].append(verdict.total)
    return {id: _mean(values) for id, values in totals.items()}


def version_shares(episodes: Sequence[Episode]) -> dict[str, float]:
    """The shares of the tokens that the policy sampled by the version of its weights, oldest first."""
    sampled = [
        turn.tokens.completion.versions
        for episode in episodes
        for trajectory in episode.trajectories
        if trajectory.trainable
        for turn in trajectory.turns
        if turn.tokens is not None
    ]
    versions, counts = np.unique(np.concatenate([np.zeros(0, np.int32), *sampled]), return_counts=True)
    total = int(counts.sum())
    return {str(version): int(n) / total for version, n in zip(versions, counts, strict=True)}


def _of_policy(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of agents that the policy played."""
    played = {(episode.id, agent) for episode in episodes for agent in episode.trained_agents}
    return [verdict for verdict in verdicts if verdict.rollout_id in played]


def scores_by_unit(
    episodes: Sequence[Episode], score_of: Mapping[str, float]
) -> dict[str, dict[str, list[float]]]:
    """The scores of the scored episodes, by what intervals are computed over, see `units_of`."""
    scored = (episode for episode in episodes if episode.id in score_of)
    return units_of((e.task.id, f"{e.task.id}/{e.seed}", score_of[e.id]) for e in scored)


def _pass_at(scores: Sequence[Sequence[float]], samples: int) -> dict[str, float]:
    if samples < 2:
        return {}
    by_k = {
        k: [pass_at_k(len(task), num_solved(task), k) for task in scores if len(task) >= k]
        for k in ks_of(samples)
    }
    return {str(k): fmean(shares) for k, shares in by_k.items() if shares}


def _by_metadata(
    scored: Sequence[Episode], scores: Sequence[float], breakdown: str | None
) -> dict[str, float]:
    by: defaultdict[str, list[float]] = defaultdict(list)
    if breakdown is not None:
        for episode, score in zip(scored, scores, strict=True):
            by[f"{breakdown}={episode.task.metadata.get(breakdown)}"].append(score)
    return {key: _mean(by[key]) for key in sorted(by)}


def _by_agent(verdicts: Sequence[Verdict]) -> dict[str, float]:
    agents = sorted({verdict.agent for verdict in verdicts})
    if len(agents) < 2:
        return {}
    return {f"agent={name}": _mean([v.total for v in verdicts if v.agent == name]) for name in agents}


def spent_on(episodes: Sequence[Episode]) -> dict[str, float]:
    """What an endpoint took for episodes, failed ones included: requests, tokens, cost; {} = none plays."""
    if (usage := _usage_of(episodes)) is None:
        return {}
    cost = {} if usage.cost is None else {"cost": usage.cost}
    return {"requests": total_counts(episodes).get("chat/requests", 0), **_tokens_used(usage), **cost}


def _usage_of(episodes: Sequence[Episode]) -> Usage | None:
    """Their tokens as an endpoint counts them; None = it has counted none."""
    usages = [episode.usage for episode in episodes if episode.usage is not None]
    return sum(usages[1:], usages[0]) if usages else None


def _tokens_used(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def part_means(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The mean of every part of the verdicts, by name; empty where only steps were rewarded.

    A part that not every verdict has (a step named it only where it applied) counts as 0 elsewhere.
    """
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    if names == [ENV]:
        return {}
    return {name: _mean([verdict.parts.get(name, 0.0) for verdict in verdicts]) for name in names}


def total_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """The counts of events over all episodes; those of tools as `tool/NAME/...`."""
    return summed(episode.events for episode in episodes)


def total_tools(episodes: Sequence[Episode]) -> dict[str, ToolStats]:
    """The statistics of each tool over all episodes, sorted by name."""
    total: defaultdict[str, ToolStats] = defaultdict(ToolStats)
    for episode in episodes:
        for name, stats in episode.tools.items():
            total[name] += stats
    return dict(sorted(total.items()))


def _failures(episodes: Sequence[Episode]) -> dict[str, int]:
    unusable = [episode for episode in episodes if episode.ending in UNUSABLE]
    return dict(Counter(e.failure.name if e.failure else str(Ending.ABORTED) for e in unusable))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
