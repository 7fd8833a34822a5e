"""How a run begins, or resumes: its configuration, its folder, its attempt."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from agentrl.assembly.cluster import check_machines, ranks_have_gpus
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import read_run
from agentrl.assembly.needed import checked_run
from agentrl.assembly.places import with_devices
from agentrl.config import Changes, Section, changes_of, effective_values, sections_of, write_toml
from agentrl.errors import ConfigError, EngineError, RemoteError, TrainerError
from agentrl.records.history import (
    ROLLED_BACK,
    Ending,
    attempts,
    begin_attempt,
    check_unlocked,
    command_of,
    end_attempt,
    locked,
    roll_back,
)
from agentrl.records.status import announced
from agentrl.run.checkpoints import Begun, Checkpoint, Checkpoints, back_to, check_has
from agentrl.run.folder import RunFolder
from agentrl.run.leaving import MachineLeavingError
from agentrl.run.summary import stopped
from agentrl.runtime.activity import READS
from agentrl.runtime.files import disk_errors
from agentrl.trainer.config import ON_GPUS
from agentrl.types import JSON
from agentrl.view.console import RunConsole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run that is about to begin, or to resume. changes: settings that are not what they were. step: of the
    checkpoint that it resumes from; None = the newest."""

    config: RunConfig
    folder: RunFolder
    resumes: bool
    changes: Mapping[str, str]
    step: int | None = None

    @property
    def warnings(self) -> Iterator[str]:
        """Sentences about changes that have a price."""
        changing = changes_of(type(self.config))
        for name in sorted(name for name in self.changes if changing.get(name) is Changes.LEARNING):
            yield f"{name} changes from here on ({self.changes[name]})."
        if "num_rollout" in self.changes and self.config.trainer.lr_decay_style != "constant":
            yield (
                f"num_rollout changes ({self.changes['num_rollout']}), and with it the decay of the learning "
                "rate; set lr_decay_iters to keep it."
            )


def start_of(
    run: str | Path | None,
    settings: Mapping[str, JSON],
    *,
    resume: bool | int,
    kind: type[RunConfig] = RunConfig,
) -> RunStart:
    """What `agentrl train RUN`, or the command of another kind of run, begins or resumes; nothing is written.

    With `resume`, the run of a run file is resumed where its folder holds one, and begins otherwise.

    Args:
        run: a run file, or the folder of a run, which is resumed.
        resume: a number is the step of the checkpoint that the run goes on from.

    Raises:
        ConfigError: there is no such checkpoint; or a setting must not change when a run resumes; or a folder
            holds no run, or one of another command; or see `checked_run` and `check_machines`.
        MissingExtraError, ModelLoadError, UnknownEnvError: see `checked_run`.
        RunBusyError: another process works on the run.
        RunExistsError: the folder holds a run, and `resume` is not given.
    """
    is_folder = run is not None and Path(run).is_dir()
    step = resume if type(resume) is int else None
    config = checked_run(run, settings, kind, resume=resume is not False)
    check_machines(config, os.environ)
    folder = RunFolder(Path(run)) if run is not None and is_folder else RunFolder.of(config)
    check_unlocked(folder.path)
    if is_folder or (resume is not False and folder.holds_run):
        command = command_of(folder.path)
        if command != config.command:
            raise ConfigError(
                f"{folder.path} is a run of `agentrl {command}`; resume it with "
                f"`agentrl {command} {folder.path} --resume`."
            )
        earlier = read_run(folder.path, kind)
        # What was decided when it began stays, on whatever machine it resumes.
        decided = {name: getattr(earlier.trainer, name) for name in ON_GPUS}
        config = with_devices(config, decided)
        if step is not None:
            check_has(folder.checkpoints, step)
        return RunStart(config, folder, True, _changes(earlier, config, folder.path), step)
    if step is not None:
        raise ConfigError(f"{folder.path} holds no run that could go on after step {step}; leave that out.")
    folder.check_free(config)
    devices = ON_GPUS if ranks_have_gpus(config) else {}
    return RunStart(with_devices(config, devices), folder, False, {})


def with_restarts(start: RunStart, console: RunConsole, attempt: Callable[[RunStart], T]) -> T:
    """Make attempts at a run until one ends with a result; each but the first resumes.

    An attempt whose engine, trainer or machines died is followed by another one, `max_restarts` times at
    most; one that stopped since a machine is going away does not count. All processes of an attempt have
    ended when it raises.

    Raises:
        EngineError, TrainerError, RemoteError: of the last attempt.
    """
    limit, number = start.config.checkpoint.max_restarts, 0
    while True:
        try:
            return attempt(start)
        except MachineLeavingError as error:
            _check_movable(error, start, console)
            console.line(f"{error} The run resumes by itself on the machines that are left.")
        except (EngineError, TrainerError, RemoteError) as error:
            number += 1
            if number > limit:
                raise
            console.line(f"{str(error).rstrip('.')}. The run resumes by itself ({number} of {limit}).")
        start = replace(start, resumes=True, changes={}, step=None)


def _check_movable(error: MachineLeavingError, start: RunStart, console: RunConsole) -> None:
    """Raise the error where the run does not go on by itself, and say how it goes on."""
    if not (start.config.checkpoint.max_restarts and error.may_move):
        for line in stopped(start.folder, start.config.command):
            console.line(line)
        raise error


@contextmanager
def attempt_at(start: RunStart, console: RunConsole) -> Iterator[Begun]:
    """Work on a run as its only process, and note how it ended.

    What the last attempt recorded after its newest checkpoint is rolled back; where a run begins, everything
    that an attempt without metrics left.

    Raises:
        RunBusyError: another process works on the run; nothing is written.
        RunExistsError: another process made a run of this name in the meantime.
        DiskError: the disk is full, or the folder is read-only: now, or in the block.
    """
    folder, command = start.folder.path, start.config.command
    remedy = f"make room there, or make it writable, then resume with `agentrl {command} {folder} --resume`"
    with locked(folder), disk_errors(folder, remedy):
        if not start.resumes:
            start.folder.check_free(start.config)
        began_s = time.perf_counter()
        with announced(folder, READS, "and its checksums") if start.resumes else nullcontext():
            origin = _rolled_back(start, console)
        read = {READS: time.perf_counter() - began_s} if start.resumes else {}
        step = None if origin is None else origin.state.step
        number = begin_attempt(folder, resumed_from=step, changes=start.changes, command=command)
        ending: Ending = "failed"
        try:
            yield Begun(number, origin, read)
            ending = "finished"
        except (KeyboardInterrupt, asyncio.CancelledError, MachineLeavingError):
            ending = "interrupted"
            raise
        except SystemExit:
            ending = "terminated"
            raise
        finally:
            # The disk that broke off the run may not take this either.
            with suppress(*(() if ending == "finished" else (OSError,))):
                end_attempt(folder, number, ending)


def _rolled_back(start: RunStart, console: RunConsole) -> Checkpoint | None:
    """The newest checkpoint, after which nothing is recorded any more; None = there is none.

    Where an earlier one was asked for, those after it are put aside with what was recorded.
    """
    folder, attempt = start.folder.path, max(1, len(attempts(start.folder.path)))
    checkpoints = Checkpoints(start.folder.checkpoints, keep=1, on_event=console.line)
    if start.step is not None:
        aside = folder / ROLLED_BACK / f"attempt_{attempt}"
        checkpoint: Checkpoint | None = back_to(checkpoints.folder, start.step, aside)
    else:
        checkpoint = checkpoints.newest() if start.resumes else None
    kept = {} if checkpoint is None else checkpoint.state.records
    roll_back(folder, kept, attempt=attempt)
    write_toml(start.config, start.folder.config, signed=True)
    if not start.resumes:
        # Of an attempt with other settings.
        shutil.rmtree(start.folder.warm_start, ignore_errors=True)
    elif checkpoint is None:
        console.line(f"{folder} has no checkpoint yet: it begins again.")
    else:
        console.line(f"{folder} resumes after step {checkpoint.state.step}.")
    return checkpoint


def _changes(before: RunConfig, after: RunConfig, folder: Path) -> dict[str, str]:
    """The settings that are not what they were, each as `old -> new`.

    Raises:
        ConfigError: one of them decides what the run has learned from.
    """
    old, new = _flat(before), _flat(after)
    changing = changes_of(type(after))
    moved = {name for name, change in changing.items() if change is Changes.PLACE}
    # A key that another trainer or engine brings along, at its default, decides nothing.
    plain = {
        key: value for kind in sections_of(type(after)).values() for key, value in kind().effective().items()
    }
    names = [
        name
        for name in (old | new)
        if old.get(name, plain.get(name)) != new.get(name, plain.get(name)) and name not in moved
    ]
    if refused := sorted(set(names) - changing.keys()):
        name, model = refused[0], RunFolder(folder).checkpoint
        # Not before a run has ended, and of one that trains.
        start = f" with --hf-checkpoint {model}" if model.is_dir() else ""
        is_left_out = new.get(name, plain.get(name)) == plain.get(name)
        by_folder = f"resume it by its folder (`agentrl {command_of(folder)} {folder} --resume`)"
        remedy = by_folder if is_left_out else f"leave {name} out"
        raise ConfigError(
            f"{folder} was begun with {name} = {_value(old, name)}, and that cannot become "
            f"{_value(new, name)} when it resumes; {remedy}, or begin a new run{start}."
        )
    return {name: f"{_value(old, name)} -> {_value(new, name)}" for name in names}


def _value(values: Mapping[str, JSON], name: str) -> JSON:
    return values.get(name, "its default")


def _flat(config: Section) -> dict[str, JSON]:
    """The settings that act, by name."""
    return {name: value for section in effective_values(config).values() for name, value in section.items()}
