"""The checkpoints of a run: everything that it takes to resume, whole or not there, with checksums.

    checkpoints/step_000020/
      state.json           how far the run was: `RunState`
      trainer/             weights, optimizers, steps (`agentrl.trainer.saved`)
      checksums.json       size and xxh3 of the files above; written last
      groups.jsonl         what groups in flight have played (`agentrl.rollout.group_log`); it grows meanwhile

A checkpoint is written while the next steps run, and renamed when all of it is on disk: a run that
is killed while it writes still has the one before.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agentrl.config import Section
from agentrl.errors import ConfigError, RecordError
from agentrl.rollout.group import GroupInProgress, GroupOutcome
from agentrl.rollout.group_log import GroupLog
from agentrl.rollout.saved import SavedGroups
from agentrl.run.stages import StageTime
from agentrl.runtime.ownership import open_file, read_file
from agentrl.types import JSON
from agentrl.types.seams import Trainer

STATE, TRAINER, CHECKSUMS, GROUPS = "state.json", "trainer", "checksums.json", "groups.jsonl"
_STEP = re.compile(r"step_(\d{6,})")
_READ_BYTES = 4 << 20


class SavedMilestone(Section):
    """A held-out evaluation that stands in the journal.

    files: its journal, and its seconds, by mode. own: metrics of a function of the user.
    """

    name: str
    step: int
    in_table: bool
    files: dict[str, str]
    seconds: dict[str, float]
    own: dict[str, float] = Field(default_factory=dict)


class RunState(Section):
    """How far a run has come at the end of a step; weights and optimizers are beside it."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")  # a loss may have diverged

    format: Literal[1] = 1
    """Of this file; another one would be read otherwise."""
    attempt: int
    """The attempt that wrote it, from 1 (count)."""
    step: int
    """Iterations of RL, or optimizer steps of SFT, that are done (count)."""
    version: int
    """Version of the weights that serve."""
    source: str
    """Fingerprint of the data."""
    next_ordinal: int
    """The first prompt of the data source that no group was started on; in SFT, of the conversations."""
    pending: tuple[int, ...] = ()
    """Prompts before `next_ordinal` whose groups were in flight, or waiting to be trained: they are played
    again."""
    skipped: dict[str, int] = Field(default_factory=dict)
    """Prompts before `next_ordinal` that were skipped since the last metrics (count), by reason."""
    elapsed_s: float
    """What the run has taken so far, over all attempts (seconds)."""
    records: dict[str, int]
    """Size of the journal's files, metrics.jsonl and diagnoses.jsonl (bytes), by path: the rest is of later
    steps."""
    milestones: tuple[SavedMilestone, ...] = ()
    """The evaluations up to now."""
    latest: dict[str, float] = Field(default_factory=dict)
    """Metrics of the last of them."""
    scores: dict[int, float] = Field(default_factory=dict)
    """`RunConfig.best_metric` of each, by the step of the weights."""
    due_evaluations: tuple[int, ...] = ()
    """Steps after which an evaluation was due that is not among them: one is played again."""
    evaluating: int | None = None
    """The step whose weights were being evaluated."""
    stages: tuple[StageTime, ...] = ()
    """The duration of each stage, over all attempts."""
    idle_rollouts: int = 0
    """The iterations in a row up to now that trained on nothing (count)."""
    data_buffer: tuple[tuple[int, str], ...] = ()
    """Groups that are kept to be trained on once more, each by its step and its id; the journal has them."""
    data_source: JSON = None
    """What a source of prompts that learns from groups depends on."""
    controls: dict[str, float] = Field(default_factory=dict)
    """Coefficients and baselines that the algorithm adapts, by name."""


class FileSum(NamedTuple):
    """Size (bytes) and xxh3 of a file."""

    size: int
    xxh3: str


_SUMS = TypeAdapter(dict[str, FileSum])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    state: RunState

    @property
    def trainer(self) -> str:
        """What the trainer saved."""
        return str(self.path / TRAINER)

    @property
    def groups(self) -> Path:
        """The groups that were in flight; see `SavedGroups`."""
        return self.path / GROUPS


class Begun(NamedTuple):
    """A process that works on a run: its number, from 1, and the checkpoint that it resumes from.

    start: what it has done so far, and how long that took (seconds), by name.
    """

    attempt: int
    origin: Checkpoint | None
    start: Mapping[str, float] = {}


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints in a folder.

    keep: how many of the newest stay (count). best: the metric of evaluations whose highest value keeps its
    checkpoint, too. on_event: gets a sentence where one could not be written.
    """

    folder: Path
    keep: int
    best: str | None = None
    on_event: Callable[[str], None] = lambda _: None
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    async def save(self, trainer: Trainer | None, state: RunState, groups: GroupLog | None = None) -> None:
        """Copy what the trainer knows, and write it beside what comes next; `written` waits for that.

        Waits for the checkpoint before this one. One that cannot be written is reported, and the run goes on.
        trainer: None = the run only plays, and a checkpoint is its state alone. groups: go on in a file of
        it.

        Raises:
            TrainerError: a process of the trainer failed.
        """
        await self.written()
        coming = self.folder / f".step_{state.step:06d}.coming"
        try:
            # What was killed while it was written.
            for partial in self._partial():
                shutil.rmtree(partial, ignore_errors=True)
            coming.mkdir(parents=True)
            if groups is not None:
                groups.begin(coming / GROUPS, state.version)
            copied = None if trainer is None else await trainer.save_state(str(coming / TRAINER))
        except OSError as error:
            self._report(state, error)
            return

        async def write() -> None:
            try:
                if copied is not None:
                    await copied
                await asyncio.to_thread(self._seal, coming, state)
            except OSError as error:
                shutil.rmtree(coming, ignore_errors=True)
                self._report(state, error)

        self._writing = asyncio.create_task(write())

    async def save_groups(
        self, step: int, ended: Iterable[GroupOutcome], stopped: Mapping[int, GroupInProgress]
    ) -> None:
        """Put the groups of a run that stops into the checkpoint of a step, if there is one.

        Raises:
            OSError: the disk does not take them.
        """
        await self.written()
        if (folder := _of_step(self.folder, step)).exists():
            SavedGroups.of(ended, stopped).write(folder / GROUPS)

    async def written(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            TrainerError: a process of the trainer failed.
        """
        if self._writing is not None:
            # A run that is stopped here still has its checkpoint written: `close` waits for it.
            await asyncio.shield(self._writing)
            self._writing = None

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; each that is not is reported.

        Raises:
            ConfigError: it is of another version of agentrl.
        """
        for path in reversed(_paths(self.folder)):
            problem = _damage(path)
            if problem is None:
                return Checkpoint(path, _read_state(path / STATE))
            self.on_event(f"Warning: {path} is damaged ({problem}); the checkpoint before it is used.")
        return None

    def removable(self) -> dict[Path, str]:
        """The folders that no resume needs, each with the reason; no checkpoint where none is whole.

        It reads every byte of the newest checkpoint. No run may write here meanwhile.

        Raises:
            ConfigError: a checkpoint is of another version of agentrl.
        """
        reasons = dict.fromkeys(self._partial(), "a checkpoint that was not completed")
        newest, paths = self.newest(), _paths(self.folder)
        if newest is None:
            return reasons
        index = paths.index(newest.path)
        superseded = self._superseded(paths[: index + 1], newest.state)
        reasons |= dict.fromkeys(superseded, "an older checkpoint")
        return reasons | dict.fromkeys(paths[index + 1 :], "a damaged checkpoint")

    def _seal(self, coming: Path, state: RunState) -> None:
        """Runs in a thread: complete the folder, have it on disk, put it in its place, remove old ones."""
        (coming / STATE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
        sums = {str(path.relative_to(coming)): _sum_of(path, coming) for path in _files(coming)}
        (coming / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        for path in (*_files(coming), *filter(Path.is_dir, coming.rglob("*")), coming):
            _sync(path)
        target = _of_step(self.folder, state.step)
        # Only a damaged one has the same step: a run resumes from the newest that is whole.
        shutil.rmtree(target, ignore_errors=True)
        os.replace(coming, target)
        _sync(self.folder)
        for path in self._superseded(_paths(self.folder), state):
            shutil.rmtree(path, ignore_errors=True)

    def _superseded(self, paths: Sequence[Path], state: RunState) -> list[Path]:
        """Those of `paths`, oldest first, that are neither among the newest nor the best.

        state: the newest; the weights that it says are being evaluated may become the best.
        """
        kept = set(paths[-self.keep :])
        if self.best is not None:
            best = self._best(paths, state.scores)
            kept |= {best} if best is not None else set()
            if (step := state.evaluating) is not None:
                kept |= {*[path for path in paths if _step_of(path) >= step][:1]}
        return [path for path in paths if path not in kept]

    def best_of(self, scores: Mapping[int, float]) -> Checkpoint | None:
        """The checkpoint whose weights scored best; None = there is none, or it is damaged.

        scores: `RunState.scores`.
        """
        path = self._best(_paths(self.folder), scores)
        return None if path is None or _damage(path) else Checkpoint(path, _read_state(path / STATE))

    def _best(self, paths: Sequence[Path], scores: Mapping[int, float]) -> Path | None:
        """Of equal ones the oldest, so that it does not move with every save."""
        scored = {path: self._score(path, scores) for path in paths}
        values = {path: value for path, value in scored.items() if value is not None}
        return max(values, key=values.__getitem__) if values else None

    def _score(self, path: Path, scores: Mapping[int, float]) -> float | None:
        """The best metric of the last evaluation of a checkpoint's weights, or of those before.

        scores: by step; without any, the checkpoint's own.
        """
        if not scores and self.best is not None:
            return _read_state(path / STATE).latest.get(self.best)
        evaluated = [step for step in scores if step <= _step_of(path)]
        return scores[max(evaluated)] if evaluated else None

    def _partial(self) -> list[Path]:
        """Checkpoints that are being written, or were when the run was killed."""
        return sorted(self.folder.glob(".step_*.coming"))

    def _report(self, state: RunState, error: OSError) -> None:
        earlier = _paths(self.folder)
        kept = f"{earlier[-1].name} is still there" if earlier else "there is none before it"
        self.on_event(
            f"Warning: the checkpoint of step {state.step} could not be written "
            f"({error.strerror or error}); {kept}, and the run goes on. Free space in {self.folder}."
        )


def check_has(folder: Path, step: int) -> None:
    """Check that there is a checkpoint of a step in a folder, whole or not.

    Raises:
        ConfigError: there is none.
    """
    steps = [_step_of(path) for path in _paths(folder)]
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"{folder} has no checkpoint of step {step}; it has those of: {there} "
            "(save_total_limit says how many are kept)."
        )


def back_to(folder: Path, step: int, aside: Path) -> Checkpoint:
    """The checkpoint of a step; those after it are moved to `aside`, the newest first.

    Killed in between, the run goes on from the newest that is left.

    Raises:
        ConfigError: there is none, or it is damaged, or of another version of agentrl.
    """
    check_has(folder, step)
    path = _of_step(folder, step)
    if (problem := _damage(path)) is not None:
        raise ConfigError(f"{path} is damaged ({problem}); resume from another one.")
    checkpoint = Checkpoint(path, _read_state(path / STATE))
    for later in reversed([each for each in _paths(folder) if _step_of(each) > step]):
        target = aside / folder.name / later.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(later, target)
    return checkpoint


def _paths(folder: Path) -> list[Path]:
    """The folders of checkpoints, oldest first."""
    found = [path for path in folder.glob("step_*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _of_step(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None = it is whole."""
    try:
        sums = _SUMS.validate_json(read_file(path / CHECKSUMS))
    except (OSError, ValueError):
        return f"{CHECKSUMS} is missing or torn"
    for name, expected in sums.items():
        file = path / name
        if not file.is_relative_to(path) or ".." in file.parts or not file.is_file():
            return f"{name} is missing"
        try:
            if file.stat().st_size != expected.size or _sum_of(file, path) != expected:
                return f"{name} is not as it was written"
        except RecordError as error:
            return str(error)
    return None


def _read_state(path: Path) -> RunState:
    try:
        return RunState.model_validate_json(read_file(path))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            f"{path} is of another version of agentrl ({where}: {problem['msg']}); resume with that version, "
            "or start a new run; one that has ended left its model in checkpoint/."
        ) from None


def _sum_of(path: Path, below: Path) -> FileSum:
    hashed, size = xxhash.xxh3_64(), 0
    with open_file(path, below=below) as file:
        while part := file.read(_READ_BYTES):
            hashed.update(part)
            size += len(part)
    return FileSum(size, hashed.hexdigest())


def _files(folder: Path) -> Iterator[Path]:
    """Those that do not change any more."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != GROUPS)


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
