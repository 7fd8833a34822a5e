"""From a run file and flags to one checked configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.build.config import RunConfig
from agentrl.config import merge, parse, place, read_toml
from agentrl.types import JSON


def load_config(run_file: str | Path | None, settings: Mapping[str, JSON]) -> RunConfig:
    """Read the run file, lay the flat settings over it, check the whole.

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    values = read_toml(Path(run_file)) if run_file is not None else {}
    if run_file is not None:
        # Alone first, so that a mistake in the file is told as the file's.
        parse(RunConfig, values, source=str(run_file))
    source = "the settings given" if run_file is None else f"{run_file} with the settings given"
    return parse(RunConfig, merge(RunConfig, values, place(RunConfig, settings)), source=source)
