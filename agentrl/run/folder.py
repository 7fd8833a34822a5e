"""The folder of one run: its paths, and a check that no other run is overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.config import write_toml
from agentrl.errors import ConfigError, RunExistsError


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
        """Whether a run has measured anything here, or left weights."""
        return (self.path / "metrics.jsonl").exists() or self.checkpoint.exists()

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Make the folder and write the resolved configuration into it.

        The folder of a run that failed before its first metrics is overwritten.

        Raises:
            RunExistsError: the folder already holds a run.
            ConfigError: the folder cannot be made.
        """
        folder = cls.of(config)
        folder.check_free(config)
        path = folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir = {config.run.output_dir!r}: the run's folder cannot be made there "
                f"({error.strerror}); choose another --output-dir."
            ) from error
        write_toml(config, folder.config)
        return folder

    def check_free(self, config: RunConfig) -> None:
        """Check that no run is overwritten.

        Raises:
            RunExistsError: the folder already holds a run.
        """
        if self.holds_run:
            raise RunExistsError(
                f"{self.path} already holds a run; resume it (`agentrl {config.command} {self.path} "
                "--resume`), choose another --name, or remove that folder."
            )

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def checkpoint(self) -> Path:
        """A Hugging Face model directory."""
        return self.path / "checkpoint"

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
    def trainer(self) -> Path:
        """Logs of the trainer's processes."""
        return self.path / "trainer"

    @property
    def report(self) -> Path:
        """The run as one page."""
        return self.path / "report.html"
