"""The batches in the journal of a run, to be trained on without playing (`agentrl train --replay`)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import read_run
from agentrl.config import effective_values
from agentrl.errors import ConfigError
from agentrl.records import read_journal, read_metrics
from agentrl.records.history import JOURNAL, METRICS
from agentrl.records.journal import SUFFIX
from agentrl.rollout.group import LEFT_OUT, GroupInProgress, GroupOutcome
from agentrl.run.journal_entries import ordinal_of, outcomes_of
from agentrl.runtime.ownership import open_file
from agentrl.types import Group, IntArray, TurnTokens

_SKIPPED = "rollout/skipped/"


@dataclass(slots=True)
class Replay:
    """The steps that the journal of a run holds, one batch each: `Rollouts`, and the place in their prompts.

    A step is complete with as many kept groups as the run's batches have. A run that was killed leaves at
    most its last step incomplete, and that is not replayed.

    folder, config: of the run. vocab_size: tokens of the model that is trained. num_steps: complete steps
    (count). next_ordinal: the first prompt that no taken batch holds. version: of the next batch.
    needs_greedy: the estimator compares with a greedy sibling; for others these episodes are left out.

    consumes: files of the journal, one for each `take`. waits for: the disk. on shutdown: nothing is open.
    """

    folder: Path
    config: RunConfig
    vocab_size: int
    fingerprint: str = ""
    num_steps: int = 0
    next_ordinal: int = 0
    version: int = 0
    needs_greedy: bool = False
    _num_done: int = 0
    _skipped: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, *, vocab_size: int, on_event: Callable[[str], None]) -> Replay | None:
        """The journal that a run replays, None = it plays. on_event: called with a sentence for each warning.

        Raises:
            ConfigError: as for `opened`; or the estimator compares siblings, and the journal has none; or
                tokens of the journal are older than the weights, and no correction was chosen.
        """
        if config.rollout.replay is None:
            return None
        replay = cls.opened(Path(config.rollout.replay), vocab_size=vocab_size)
        for warning in _warnings(replay, config):
            on_event(f"Warning: {warning}")
        replay.needs_greedy = config.algorithm.advantage_estimator.plays_greedy
        return replay

    @classmethod
    def opened(cls, folder: Path, *, vocab_size: int) -> Replay:
        """The journal of the run in a folder; its first step is read and checked.

        Raises:
            ConfigError: the folder holds no run, its journal no complete step, or the tokens are of another
                tokenizer.
        """
        replay = cls(folder, read_run(folder), vocab_size)
        steps = list(takewhile(lambda step: replay._path(step).exists(), count(1)))
        if steps and not replay._is_complete(replay._read(steps[-1])):
            steps.pop()
        if not steps:
            raise ConfigError(
                f"replay = {folder}: its journal holds no complete step; name the folder of a run that "
                "`agentrl train` or `agentrl rollout` has written."
            )
        replay._take(1)
        replay.num_steps = len(steps)
        first = replay._path(1)
        with open_file(first, below=folder) as file:
            replay.fingerprint = f"journal {hashlib.file_digest(file, 'sha256').hexdigest()}"
        metrics = folder / METRICS
        rows = read_metrics(metrics) if metrics.exists() else []
        replay._skipped = {int(row["step"] or 0): _skipped_in(row) for row in rows if _skipped_in(row)}
        return replay

    def resume(self, num_done: int, *, version: int, next_ordinal: int) -> None:
        """Go on where so many batches are done. Before the first `take`."""
        self._num_done, self.version, self.next_ordinal = num_done, version, next_ordinal

    def check(self, fingerprint: str) -> None:
        """Check that this is the journal with that fingerprint.

        Raises:
            ConfigError: it is another one.
        """
        if self.fingerprint != fingerprint:
            raise ConfigError(
                f"replay = {self.folder} is not the journal that the run began with; name that one, or start "
                "a new run."
            )

    async def take(self) -> list[GroupOutcome]:
        """The groups of the next step, as they were played.

        Raises:
            ConfigError: a file of the journal is damaged or incomplete, or a token is beyond the vocabulary.
        """
        outcomes = await asyncio.to_thread(self._take, self._num_done + 1)
        if not self.needs_greedy:
            outcomes = [_without_greedy(outcome) for outcome in outcomes]
        # Another algorithm may update less often than the run that played.
        versions = (tokens.completion.versions for tokens in _tokens_of(outcomes))
        self.version = max(self.version, _highest(versions))
        ordinals = [ordinal_of(episode.id) for outcome in outcomes for episode in outcome.episodes]
        self.next_ordinal = max([self.next_ordinal, *(n + 1 for n in ordinals if n is not None)])
        return outcomes

    def advance(self, num_done: int, *, version: int, is_published: bool = True) -> None:
        """Record that `num_done` batches are done and the policy has this version."""
        del is_published
        self._num_done, self.version = num_done, version

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Nothing: which groups come is settled."""

    def source_state(self, pending: Iterable[int]) -> None:
        """None: the journal is as it is."""

    def take_skipped(self) -> Mapping[str, int]:
        """The number of prompts that were skipped when the last taken step was played, by reason."""
        return self._skipped.get(self._num_done, {})

    @property
    def pending(self) -> Sequence[int]:
        """Empty: no batch is read ahead."""
        return ()

    @property
    def skipped(self) -> Mapping[str, int]:
        """Empty: prompts are skipped in the step that they belong to."""
        return {}

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """A block; nothing is in flight anyway."""
        yield

    async def stop(self) -> Mapping[int, GroupInProgress]:
        """Nothing is in flight."""
        return {}

    async def close(self) -> list[GroupOutcome]:
        """Nothing is open, and no batch is read ahead."""
        return []

    def _path(self, step: int) -> Path:
        return self.folder / JOURNAL / f"step_{step:06d}{SUFFIX}"

    def _take(self, step: int) -> list[GroupOutcome]:
        outcomes = self._read(step)
        if not self._is_complete(outcomes):
            raise ConfigError(f"{self._path(step)} is incomplete; replay fewer steps (num_rollout).")
        highest = _highest(ids for t in _tokens_of(outcomes) for ids in (t.world_ids, t.completion.token_ids))
        if highest >= self.vocab_size:
            raise ConfigError(
                f"{self._path(step)} holds token {highest}, and the model has {self.vocab_size} tokens: it "
                "was played with another tokenizer; name the model that played it (hf_checkpoint)."
            )
        return outcomes

    def _read(self, step: int) -> list[GroupOutcome]:
        """The groups of a step; none of one that the run did not complete."""
        path = self._path(step)
        try:
            entries = list(read_journal(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be replayed: {error}; restore that file.") from None
        try:
            return outcomes_of(entries)
        except ValueError:
            return []

    def _is_complete(self, outcomes: list[GroupOutcome]) -> bool:
        rollout = self.config.rollout
        # What a loop of the caller's did not train on was in its batch.
        groups = (outcome.group for outcome in outcomes if outcome.reason in {"", LEFT_OUT})
        sizes = [len(group.episodes) - len(group.greedy) for group in groups if group is not None]
        return sizes == [rollout.n_samples_per_prompt] * rollout.prompts


def _warnings(replay: Replay, config: RunConfig) -> Iterator[str]:
    """Sentences on how the run that replays differs from the one that played."""
    played, estimator = replay.config, config.algorithm.advantage_estimator
    if config.algorithm.compares and played.rollout.n_samples_per_prompt < 2:
        raise ConfigError(
            f"advantage_estimator `{estimator.name}` compares siblings, and groups in {replay.folder} are of "
            "one episode; choose one that does not, such as reinforce_plus_plus."
        )
    if estimator.plays_greedy and not played.algorithm.advantage_estimator.plays_greedy:
        raise ConfigError(
            f"advantage_estimator `{estimator.name}` compares with a greedy episode of each prompt, and "
            f"{replay.folder} was played without; choose another, such as rloo."
        )
    teacher = config.algorithm.opd.teacher if config.algorithm.use_opd else None
    if teacher is not None and played.rollout.privileged_context_path is None:
        raise ConfigError(
            f"opd_teacher = {teacher} reads prompts with a privileged context, and {replay.folder} was "
            "played without one; name a run that was played with privileged_context_path."
        )
    own, theirs = config.rollout.data_buffer_groups, played.rollout.plays_off_policy_by
    if own or theirs:
        replayed = (
            f"replay = {replay.folder}, played with {theirs}," if theirs else config.rollout.off_policy_by
        )
        try:
            config.algorithm.check_rollouts(None, off_policy_by=replayed)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if played.env.env != config.env.env:
        yield (
            f"{replay.folder} was played in {played.env.env}; {config.env.env} gives the limits and the "
            "fresh model here, and its tasks are not played."
        )
    if _initial_weights(played) != _initial_weights(config):
        yield (
            f"{replay.folder} was played with other settings of the initial weights than this run has: if "
            "the weights differ, its tokens are off-policy from the first step on."
        )
    if replay.num_steps < config.rollout.num_rollout:
        yield (
            f"{replay.folder} holds {replay.num_steps} of num_rollout = {config.rollout.num_rollout} steps; "
            "the training ends after these."
        )


def _without_greedy(outcome: GroupOutcome) -> GroupOutcome:
    if outcome.group is None or not outcome.group.greedy:
        return outcome
    group = outcome.group.without_greedy
    return replace(outcome, group=group, finished=group.episodes)


def _skipped_in(row: Mapping[str, float | None]) -> dict[str, int]:
    return {n.removeprefix(_SKIPPED): int(v) for n, v in row.items() if n.startswith(_SKIPPED) and v}


def _tokens_of(outcomes: Iterable[GroupOutcome]) -> Iterator[TurnTokens]:
    """The tokens of all turns of the policy; opponents may have another tokenizer."""
    for episode in (episode for outcome in outcomes for episode in outcome.episodes):
        trained = (trajectory for trajectory in episode.trajectories if trajectory.trainable)
        turns = (turn for trajectory in trained for turn in trajectory.turns)
        yield from (turn.tokens for turn in turns if turn.tokens is not None)


def _highest(arrays: Iterable[IntArray]) -> int:
    return max((int(array.max()) for array in arrays if len(array)), default=0)


def _initial_weights(config: RunConfig) -> object:
    """The settings that decide the weights which the first batch is played with."""
    values = effective_values(config)
    warm_start = values["warm_start"] if config.warm_starts else None
    is_drawn = config.model.hf_checkpoint is None or config.warm_starts
    world = (config.env.env, config.env.env_kwargs, config.run.seed) if is_drawn else None
    return values["model"], warm_start, world
