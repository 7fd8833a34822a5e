"""From a run file and flags to one checked configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.config import Section, by_section, merge, parse, read_toml, refuse_inactive
from agentrl.types import JSON


def load_config(run_file: str | Path | None, settings: Mapping[str, JSON]) -> RunConfig:
    """Read the run file, apply the flat settings over it, check the result.

    A setting of the file without effect in this run is kept, see `listed_inactive`; one of `settings` is
    refused.

    Raises:
        ConfigError: one sentence about the first error.
    """
    values = read_toml(Path(run_file)) if run_file is not None else {}
    if run_file is not None:
        # Without the settings first, so that an error in the file is reported as the file's.
        parse(RunConfig, values, source=str(run_file))
    source = "the settings given" if run_file is None else f"{run_file} with the settings given"
    config = parse(RunConfig, merge(RunConfig, values, by_section(RunConfig, settings)), source=source)
    refuse_inactive(config, settings, source=source)
    return config


def listed_inactive(config: RunConfig) -> Iterator[str]:
    """A line for each reason why settings of the run file have no effect."""
    sections: list[Section] = [getattr(config, name) for name in RunConfig.model_fields]
    were_set = {name for section in sections for name in section.model_fields_set}
    names: dict[str, list[str]] = {}
    for name, change in config.inactive.items():
        if name in were_set:
            names.setdefault(change.partition(";")[0], []).append(name)
    yield from (f"No effect here: {', '.join(keys)} ({reason})." for reason, keys in names.items())
