"""What the folder of a finished run says about its episodes, its engine and its trainer.

trajectories/step_*.jsonl.gz    turns, tokens, versions, failures, groups without a gradient
timeline/attempt_*.json.gz      when turns of the newest episodes began and ended, and calls of the trainer
metrics.jsonl                   seconds and tokens of each iteration
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import read_run
from agentrl.errors import ConfigError
from agentrl.records import Entry, Outcome, Record, read_journal, read_metrics
from agentrl.records.history import JOURNAL, METRICS
from agentrl.records.journal import SUFFIX
from agentrl.rollout.over_sampling import NOT_CHOSEN, OVER_SAMPLED
from agentrl.rollout.staleness import STALE
from agentrl.runtime.activity import ACT, EPISODE, PUBLISH, SCORE, TRAIN
from agentrl.runtime.ownership import read_gzip
from agentrl.types import Ending, Episode
from agentrl_simulate.workload import FILTERED, EpisodePlan, GroupPlan, TurnPlan

_MAX_BYTES: Final = 1 << 30

_LATE = frozenset({OVER_SAMPLED, NOT_CHOSEN, STALE})
"""Reasons of complete groups that no filter of the run dropped."""
_MIN_ITERATIONS = 3


class RecordedInterval(NamedTuple):
    """Begin and end (seconds since the run began)."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class PlayedTurn(NamedTuple):
    """A turn whose times are known. prefilled: tokens of its prompt that were not cached; context: all of it;
    sampled: tokens (counts)."""

    span: RecordedInterval
    prefilled: int
    context: int
    sampled: int


class TrainedBatch(NamedTuple):
    """An iteration: seconds of its phases, tokens that were trained on (count), optimizer steps (count).

    overlap: the share of the trainer's time in which an engine worked. between_s: from its end to the begin
    of the next one (seconds); None = it is the last.
    """

    score_s: float
    update_s: float
    tokens: float
    steps: float
    overlap: float
    between_s: float | None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A finished run.

    groups: those that were complete. failed, attempts: episodes (counts). turns: those with times. training,
    publishing: calls of the trainer, with times.
    """

    config: RunConfig
    groups: Sequence[GroupPlan]
    failed: int
    attempts: int
    turns: Sequence[PlayedTurn]
    training: Sequence[RecordedInterval]
    publishing: Sequence[RecordedInterval]
    batches: Sequence[TrainedBatch]


def read_recorded(folder: Path) -> RecordedRun:
    """What a run recorded.

    Raises:
        ConfigError: it is no run that was trained, or one with too few iterations.
    """
    config = read_run(folder)
    batches = list(_batches(read_metrics(folder / METRICS))) if (folder / METRICS).exists() else []
    if len(batches) < _MIN_ITERATIONS:
        raise ConfigError(
            f"{folder} has {len(batches)} trained iterations, and at least {_MIN_ITERATIONS} are measured; "
            "name the folder of a longer run of `agentrl train`."
        )
    spans = _Spans.read(folder)
    journal = _Journal()
    for path in sorted((folder / JOURNAL).glob(f"step_*{SUFFIX}")):
        journal.add(read_journal(path), spans)
    groups = list(journal.groups())
    if not groups:
        raise ConfigError(f"the journal of {folder} has no complete group; name the folder of another run.")
    return RecordedRun(
        config=config,
        groups=groups,
        failed=journal.failed,
        attempts=journal.attempts,
        turns=journal.turns,
        training=spans.training,
        publishing=spans.publishing,
        batches=batches,
    )


def _batches(records: Sequence[Record]) -> Iterator[TrainedBatch]:
    rows = [row for row in records if row.get("perf/actor_train_time") is not None]
    for row, following in zip_longest(rows, rows[1:]):
        update_s, score_s = _value(row, "actor_train_time"), _value(row, "log_probs_time")
        step_s = _value(row, "step_time")
        trainer_s = max((1.0 - _value(row, "wait_time_ratio")) * step_s, 1e-9)
        between_s = None
        if following is not None:
            apart_s = (following["time_s"] or 0.0) - (row["time_s"] or 0.0)
            between_s = max(apart_s - _value(following, "step_time"), 0.0)
        yield TrainedBatch(
            score_s,
            update_s,
            _value(row, "actor_train_tok_per_s") * update_s,
            row.get("train/optimizer_steps") or 0.0,
            min(_value(row, "overlap_time_ratio") * step_s / trainer_s, 1.0),
            between_s,
        )


def _value(row: Record, name: str) -> float:
    return row.get(f"perf/{name}") or 0.0


@dataclass(slots=True)
class _Spans:
    """The spans of a timeline. acts: of turns, by episode, in their order. episodes: of all of an episode."""

    acts: dict[str, list[RecordedInterval]] = field(default_factory=dict)
    episodes: dict[str, RecordedInterval] = field(default_factory=dict)
    training: list[RecordedInterval] = field(default_factory=list)
    publishing: list[RecordedInterval] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> _Spans:
        """The spans of the last attempt; none where it left no timeline."""
        paths = sorted((folder / "timeline").glob("attempt_*.json.gz"), key=_number)
        spans = cls()
        if not paths:
            return spans
        text = read_gzip(paths[-1], below=folder, most=_MAX_BYTES)
        events = json.loads(text)["traceEvents"]
        for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):
            begin_s = event["ts"] / 1e6
            spans.add(
                event["name"], event["args"]["of"], RecordedInterval(begin_s, begin_s + event["dur"] / 1e6)
            )
        return spans

    def add(self, name: str, owner: str, span: RecordedInterval) -> None:
        """Add a span; those of what is not used are left out."""
        if owner in (SCORE, TRAIN):
            self.training.append(span)
        elif owner == PUBLISH:
            self.publishing.append(span)
        elif name.split(" ", maxsplit=1)[0] == ACT:
            self.acts.setdefault(owner, []).append(span)
        elif name == EPISODE:
            earlier = self.episodes.get(owner, span)
            self.episodes[owner] = RecordedInterval(min(earlier[0], span[0]), max(earlier[1], span[1]))


def _number(path: Path) -> int:
    return int(path.name.removeprefix("attempt_").split(".")[0])


class _Journal:
    """The episodes of a journal, and their turns with times."""

    def __init__(self) -> None:
        self.failed = self.attempts = 0
        self.turns: list[PlayedTurn] = []
        self._episodes: dict[str, list[EpisodePlan]] = {}
        self._reasons: dict[str, str] = {}
        self._with_gradient: set[str] = set()
        self._timed: list[EpisodePlan] = []

    def add(self, entries: Iterable[Entry], spans: _Spans) -> None:
        """Add the entries of a step."""
        for entry in entries:
            episode = entry.episode
            if episode.ending is Ending.ABORTED:
                continue
            self.attempts += 1
            self.failed += episode.ending is Ending.FAILED
            if not entry.verdicts or episode.ending is Ending.FAILED or not episode.turns:
                continue
            group = episode.id.partition("-")[0]
            if any(np.any(advantages) for advantages in entry.advantages.values()):
                self._with_gradient.add(group)
            is_filtered = entry.outcome is Outcome.DROPPED and not entry.in_batch
            self._reasons[group] = FILTERED if is_filtered and entry.reason not in _LATE else ""
            self._episodes.setdefault(group, []).append(self._plan(episode, spans))

    def groups(self) -> Iterator[GroupPlan]:
        """The complete groups; times that no span has are those of another turn."""
        has_gradients = bool(self._with_gradient)
        pool = [turn for plan in self._timed for turn in plan.turns]
        for group, plans in self._episodes.items():
            timed = [self._with_times(plan, pool) for plan in plans]
            is_idle = has_gradients and group not in self._with_gradient and not self._reasons[group]
            yield GroupPlan(timed, self._reasons[group], is_idle)

    def _plan(self, episode: Episode, spans: _Spans) -> EpisodePlan:
        turns = [
            (len(turn.tokens.world_ids), len(turn.tokens.completion.token_ids), turn.tokens.completion)
            for turn in episode.turns
            if turn.tokens is not None
        ]
        acts = spans.acts.get(episode.id, [])
        whole = spans.episodes.get(episode.id)
        if whole is None or len(acts) != len(turns):
            return EpisodePlan([TurnPlan(world, sampled, -1.0) for world, sampled, _ in turns])
        begins = [*(act.start_s for act in acts[1:]), whole.end_s]
        plans, prefix = [], 0
        for (world, sampled, completion), act, then in zip(turns, acts, begins, strict=True):
            context = prefix + world
            self.turns.append(PlayedTurn(act, max(context - completion.cached_tokens, 0), context, sampled))
            plans.append(TurnPlan(world, sampled, max(then - act.end_s, 0.0)))
            prefix = context + sampled
        plan = EpisodePlan(plans, max(acts[0].start_s - whole.start_s, 0.0))
        self._timed.append(plan)
        return plan

    def _with_times(self, plan: EpisodePlan, pool: Sequence[TurnPlan]) -> EpisodePlan:
        """The plan, with times of recorded turns where it has none of its own."""
        if not plan.turns or plan.turns[0].then_s >= 0.0:
            return plan
        start = len(self._reasons) + plan.num_tokens
        return EpisodePlan(
            [
                turn._replace(then_s=pool[(start + number) % len(pool)].then_s if pool else 0.0)
                for number, turn in enumerate(plan.turns)
            ]
        )


def replicas_of(config: RunConfig) -> int:
    """Engines that played (count)."""
    return sum(group.num_engines for group in config.engine.groups) if config.engine.engine == "sglang" else 1


def mean_of(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
