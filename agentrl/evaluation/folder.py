"""The folder of an eval-only run: its settings, every episode as soon as it has ended, and its report.

    config.toml                              the settings
    identity.json                            what the result depends on; the same when it goes on
    trajectories/eval_test_000000.jsonl.gz   every episode with its verdict, written when it has ended
    eval_test_000000.seconds                 how long the attempts took, of each set of prompts
    report.json                              scores and counts; written last
    run.lock                                 locked by the process that writes here

Without output_dir the folder is a temporary one: it is removed when the evaluation has ended, and kept where
it was interrupted or killed after an episode had ended.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from agentrl.config import Section, Values, write_toml
from agentrl.errors import ConfigError, RunExistsError, WorldBrokenError
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.identity import EvalIdentity
from agentrl.evaluation.record import EpisodeRecord
from agentrl.evaluation.report import EvalReport
from agentrl.records.history import ATTEMPTS, JOURNAL, METRICS, locked
from agentrl.records.lines import from_line
from agentrl.runtime.files import disk_errors, write_text
from agentrl.runtime.ownership import read_file
from agentrl.runtime.temporary import PREFIX, sweep, temporary_folder

REPORT = "report.json"
_NAME = "eval"
_REPORTS = TypeAdapter(EvalReport)


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """The folder of one evaluation, which this process alone writes into."""

    path: Path

    @classmethod
    @contextmanager
    def opened(cls, output_dir: str | None, *, resume: bool) -> Iterator[EvalFolder]:
        """The folder `output_dir`; None = a temporary one. resume: it may hold an evaluation that goes on.

        Raises:
            RunExistsError: it holds an evaluation, and `resume` is false; or a run.
            RunBusyError: another process writes there; nothing is written.
            ConfigError: it cannot be made.
            DiskError: the disk is full, or the folder read-only: now, or in the block.
        """
        if output_dir is None:
            with _temporary() as path, disk_errors(path, "make room there, or name another output_dir"):
                yield cls(path)
            return
        path = Path(output_dir)
        remedy = "make room there, or make it writable, then go on with the same command and --resume"
        with locked(path), disk_errors(path, remedy):
            _check_free(path, resume=resume)
            yield cls(path)

    def begin(self, identity: EvalIdentity, config: EvalConfig, directory: str | None) -> EvalReport | None:
        """Write the settings and what the result depends on. directory: see `write_settings`.

        Returns:
            the report of an evaluation that has ended already; None = there are episodes to play.

        Raises:
            ConfigError: the evaluation that is there depends on something else, or its report is broken.
        """
        path = self.path / REPORT
        if (self.path / JOURNAL).exists() or path.exists():
            identity.check(self.path)
        if path.exists():
            try:
                return _REPORTS.validate_python(from_line(read_file(path)))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read ({error}); remove it to make it again.") from None
        write_settings(config, self.path, directory)
        identity.write(self.path)
        return None

    def record(self, prompts: str) -> EpisodeRecord:
        """The journal of the set of prompts with this name, or the split."""
        return EpisodeRecord(self.path, prompts)

    def finish(self, report: EvalReport) -> None:
        """Write the report over all sets of prompts.

        Raises:
            OSError: the disk does not take it.
        """
        write_text(self.path / REPORT, f"{json.dumps(report.as_json(), indent=2)}\n")


def write_settings(config: Section, folder: Path, directory: str | None) -> None:
    """Write config.toml: the settings, and where the model is, by whose tokenizer the tokens are read.

    directory: of the model; None = an endpoint or a script plays, which writes no tokens.

    Raises:
        OSError: the file cannot be written.
    """
    write_toml(config, folder / "config.toml", tables=model_table(directory), signed=True)


def model_table(directory: str | None) -> Values:
    """The table of config.toml that says where the model is."""
    return {} if directory is None else {"model": {"hf_checkpoint": str(Path(directory).resolve())}}


@contextmanager
def _temporary() -> Iterator[Path]:
    """A temporary folder. It stays where the block did not end, and episodes of use are in it."""
    with temporary_folder(_NAME, kept_with=JOURNAL) as path:
        try:
            yield path
        except (ConfigError, WorldBrokenError):
            shutil.rmtree(path / JOURNAL, ignore_errors=True)
            raise


def killed_evaluations() -> list[str]:
    """A sentence for each temporary folder of an evaluation that was killed, and that holds episodes."""
    return [
        f"{path} holds the episodes of an evaluation that was killed. Go on from there with the same "
        f"settings, --output-dir {path} and --resume, or remove that folder."
        for path in sweep(Path(tempfile.gettempdir()), f"{PREFIX}{_NAME}-")
    ]


def _check_free(path: Path, *, resume: bool) -> None:
    """Check that no run is overwritten, and no evaluation without `resume`."""
    if any((path / name).exists() for name in (ATTEMPTS, METRICS)):
        raise RunExistsError(f"{path} holds a run of another command; choose another output_dir.")
    if resume:
        return
    if (path / REPORT).exists():
        raise RunExistsError(
            f"{path} already holds episodes; see their report with --resume, choose another output_dir, or "
            "remove that folder."
        )
    if (path / JOURNAL).exists():
        raise RunExistsError(
            f"{path} already holds episodes of an evaluation that has not ended; go on with --resume, choose "
            "another output_dir, or remove that folder."
        )
