"""The output folder of an eval-only run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import Values, write_toml
from agentrl.errors import ConfigError, RunExistsError
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluation
from agentrl.evaluation.report import EvalReport
from agentrl.observe import Journal


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """A folder with config.toml, report.json and trajectories/: a journal like that of a training run."""

    path: Path

    @classmethod
    def create(cls, config: EvalConfig, directory: str | None) -> EvalFolder:
        """Make `output_dir` and write the settings into it. directory: see `write_settings`.

        Raises:
            RunExistsError: it holds an evaluation, or a run.
            ConfigError: it cannot be made.
        """
        path = Path(config.eval.output_dir or ".")
        if (path / "report.json").exists() or (path / "trajectories").exists():
            raise RunExistsError(
                f"{path} already holds episodes; choose another output_dir, or remove that folder."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_settings(config, path, directory)
        except OSError as error:
            raise ConfigError(
                f"output_dir = {str(path)!r} cannot be made ({error.strerror}); choose another."
            ) from error
        return cls(path)

    async def write(self, evaluations: Mapping[str, Evaluation], report: EvalReport) -> None:
        """Write the episodes of every set of prompts, then the report over all of them.

        Raises:
            UserError: the episodes cannot be written.
        """
        async with Journal(self.path) as journal:
            for evaluation in evaluations.values():
                await journal.write_eval(evaluation.report.split, 0, evaluation.entries())
        text = json.dumps(report.as_json(), indent=2)
        (self.path / "report.json").write_text(f"{text}\n", encoding="utf-8")


def write_settings(config: EvalConfig, folder: Path, directory: str | None) -> None:
    """Write config.toml: the settings, and where the model is, by whose tokenizer the tokens are read.

    directory: of the model; None = an endpoint or a script plays, which writes no tokens.

    Raises:
        OSError: the file cannot be written.
    """
    tables: Values = {} if directory is None else {"model": {"hf_checkpoint": str(Path(directory).resolve())}}
    write_toml(config, folder / "config.toml", tables=tables)
