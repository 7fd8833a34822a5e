"""The metrics of a run: one record for each step, sent to every tracker, a function of the user too."""

from __future__ import annotations

import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

from agentrl.errors import RecordError
from agentrl.records import lines
from agentrl.records.config import ObserveConfig
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
import inspect

_numbers = count()
Record: TypeAlias = dict[str, float | None]
"""One step: `step`, `time_s` (since the run began) and metrics by name. None = not a finite number."""


class Tracker(Protocol):
    """A destination of metrics. It may fail; the run goes on without it."""

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Record the metrics of one step; they may be NaN or infinite. time_s: since the run began."""

    def close(self) -> None:
        """Write what is buffered and release all resources."""


class JsonlTracker:
    """One JSON line a step: {"step": 3, "time_s": 4.1, "rollout/raw_reward": 0.5}. null = not finite."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Append one line.

        Raises:
            OSError: the file cannot be written.
        """
        numbers = {name: _finite_or_none(float(value)) for name, value in metrics.items()}
        lines.append(self._path, [lines.to_line({"step": step, "time_s": round(time_s, 3), **numbers})])

    def close(self) -> None:
        """Close nothing: no file stays open."""


class TensorBoardTracker:
    """Event files for TensorBoard, written by its own package.

    resumed_from: the last step that counts of what is in the folder already.
    """

    def __init__(self, folder: Path, *, resumed_from: int | None = None) -> None:
        # Imported late: it costs more than everything else here together, and may be switched off.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._start_s = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        # Its EventFileWriter has a thread, which prints a traceback where the disk is full.
        name = f"events.out.tfevents.{int(self._start_s):010d}.{gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._add(Event(wall_time=self._start_s, file_version="brain.Event:2"))
        if resumed_from is not None:
            # TensorBoard then shows nothing that an earlier attempt logged from this step on.
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=self._start_s, step=resumed_from + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Write one event that holds every metric as a scalar.

        Raises:
            OSError: the folder cannot be written.
        """
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        summary = self._summary(value=values)
        self._add(self._event(wall_time=self._start_s + time_s, step=step, summary=summary))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class WandbTracker:
    """A run of Weights & Biases, in the folder wandb/ of the run; it reads its key itself.

    All attempts of a run are one run there: its id is kept in the folder. The horizontal axis is the metric
    `step`, so that steps which a resumed run plays again are accepted.

    Args:
        run_dir: the run's folder; its name is the run's name there.
        settings: shown with the run.
    """

    def __init__(self, run_dir: Path, config: ObserveConfig, settings: Mapping[str, JSON]) -> None:
        # Imported late: it takes a second, and most runs do without.
        import wandb

        id_file = run_dir / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            name=run_dir.name,
            mode=config.wandb_mode,
            id=read_file(id_file).decode().strip(),
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Queue one row, with the step and the time in it."""
        self._run.log({"step": step, "time_s": time_s, **metrics})

    def close(self) -> None:
        """Write, and send what is queued."""
        self._run.finish()


class Earlier(NamedTuple):
    """What a run had logged that goes on. step: the last one of it. elapsed_s: since its begin (seconds)."""

    step: int
    elapsed_s: float


class MetricLog:
    """Writes each step's metrics to metrics.jsonl, and sends them to every tracker.

    A tracker that fails is removed, with one warning. metrics.jsonl is a record of the run, as the journal
    is: a run that cannot write it ends. TensorBoard events go to tensorboard/ unless switched off.

    trackers: further ones, by name; each is opened here. earlier: of a run that goes on. on_event: called
    with the sentence of such a warning; None = it is a RuntimeWarning.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        use_tensorboard: bool = True,
        trackers: Mapping[str, Callable[[], Tracker]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        earlier: Earlier | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        step, elapsed_s = earlier or (None, 0.0)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._clock, self._warn = clock, on_event or _warn
        self._started = clock() - elapsed_s
        self._record = JsonlTracker(run_dir / "metrics.jsonl")
        self._is_broken = False
        self._trackers: dict[str, Tracker] = {}
        opened: dict[str, Callable[[], Tracker]] = {}
        if use_tensorboard:
            folder = run_dir / "tensorboard"
            opened["tensorboard"] = lambda: TensorBoardTracker(folder, resumed_from=step)
        for name, open_tracker in {**opened, **(trackers or {})}.items():
            with _RemoveOnError(name, self._trackers, self._warn):
                self._trackers[name] = open_tracker()

    @property
    def elapsed_s(self) -> float:
        """Since the run began (seconds)."""
        return self._clock() - self._started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step.

        Raises:
            OSError: metrics.jsonl cannot be written.
        """
        time_s = self.elapsed_s
        try:
            self._record.log(step, metrics, time_s=time_s)
        except OSError:
            self._is_broken = True
            raise
        for name, tracker in list(self._trackers.items()):
            with _RemoveOnError(name, self._trackers, self._warn):
                tracker.log(step, metrics, time_s=time_s)

    def close(self) -> None:
        """Close every tracker. Where metrics.jsonl has failed, one that fails, too, causes no warning."""
        for name, tracker in list(self._trackers.items()):
            with _RemoveOnError(name, self._trackers, _ignore if self._is_broken else self._warn):
                tracker.close()
        self._trackers.clear()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RemoveOnError:
    """Removes a tracker that raises, with a warning: a failing tracker must not end the run."""

    def __init__(self, name: str, trackers: dict[str, Tracker], warn: Callable[[str], None]) -> None:
        self._name, self._trackers, self._warn = name, trackers, warn

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._trackers.pop(self._name, None)
        self._warn(
            f"The tracker `{self._name}` stopped ({type(error).__name__}: {error}); "
            "the run goes on, and this tracker receives no further numbers."
        )
        return True


def _warn(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def _ignore(sentence: str) -> None:
    del sentence


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl, in order; an incomplete last line is skipped.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: a line before the last is not as it was written.
    """
    rows = list(lines.read(path))
    for number, row in enumerate(rows, start=1):
        if "step" not in row or not {type(value) for value in row.values()} <= {int, float, type(None)}:
            raise RecordError(f"{path} line {number} holds no metrics of a step")
    return cast(list[Record], rows)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


StepFunction: TypeAlias = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics; where it returns True, the run ends after that step."""


class Callback:
    """A `Tracker` that calls a function. ends_run: it has returned True."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function
        self.ends_run = False

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Call the function with a copy of the metrics."""
        del time_s
        if self._function(step, dict(metrics)) is True:
            self.ends_run = True

    def close(self) -> None:
        """Nothing is open."""


def check_callback(function: StepFunction) -> None:
    """Check that a function can be called back.

    Raises:
        ValueError: it takes other arguments, or is a coroutine function.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError("a callback is no coroutine function; write it with def, not async def.")
    try:
        inspect.signature(function).bind(1, {})
    except TypeError as error:
        raise ValueError(f"a callback is called with a step and its metrics ({error}); mend it.") from None
