"""The folder of one run: its paths, and a check that no other run is overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.errors import RunExistsError
from agentrl.records.history import JOURNAL, METRICS, attempts


@dataclass(frozen=True, slots=True)
class RunFolder:
    """runs/<name>/ with config.toml, metrics.jsonl, trajectories/, checkpoint/ and report.html."""

    path: Path

    @classmethod
    def of(cls, config: RunConfig) -> RunFolder:
        """Where the run of this configuration is, or will be."""
        return cls(Path(config.run.output_dir) / config.run_name)

    @property
    def holds_run(self) -> bool:
        """Whether a run has measured anything here, or left weights or a checkpoint."""
        left = (self.path / METRICS, self.checkpoint, *self.checkpoints.glob("step_*"))
        return any(path.exists() for path in left)

    def check_free(self, config: RunConfig) -> None:
        """Check that no run is overwritten. The folder of one that measured nothing is free.

        Raises:
            RunExistsError: the folder already holds a run, or an evaluation.
        """
        if self.holds_run:
            raise RunExistsError(
                f"{self.path} already holds a run; resume it (`agentrl {config.command} {self.path} "
                "--resume`), choose another --name, or remove that folder."
            )
        if (self.path / JOURNAL).exists() and not attempts(self.path):
            raise RunExistsError(f"{self.path} holds the episodes of an evaluation; choose another --name.")

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def checkpoint(self) -> Path:
        """A Hugging Face model directory."""
        return self.path / "checkpoint"

    @property
    def best(self) -> Path:
        """The Hugging Face model directory of the weights that scored best, where the last ones are worse."""
        return self.path / "checkpoint-best"

    @property
    def checkpoints(self) -> Path:
        """What the run resumes from."""
        return self.path / "checkpoints"

    @property
    def warm_start(self) -> Path:
        """The Hugging Face model directory after the warm start."""
        return self.path / "checkpoint-warm-start"

    @property
    def model(self) -> Path:
        """A new model with its initial weights; an existing model is not copied."""
        return self.path / "model"

    @property
    def engine(self) -> Path:
        """Logs of inference servers."""
        return self.path / "engine"

    @property
    def players(self) -> Path:
        """Logs of the processes that play groups."""
        return self.path / "players"

    @property
    def trainer(self) -> Path:
        """Logs of the trainer's processes."""
        return self.path / "trainer"

    def timeline(self, attempt: int) -> Path:
        """A Chrome trace of what an attempt did."""
        return self.path / "timeline" / f"attempt_{attempt}.json.gz"

    @property
    def summary(self) -> Path:
        """The results, for programs."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The run as one page."""
        return self.path / "report.html"
