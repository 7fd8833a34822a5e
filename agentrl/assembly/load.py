"""From a run file and flags to one checked configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import file_source
from agentrl.assembly.sections import EPOCHS, SFT
from agentrl.config import Section, by_section, merge, parse, read_toml, read_written, refuse_inactive
from agentrl.envs import env_ids
from agentrl.errors import ConfigError
from agentrl.types import JSON


def load_config(
    run_file: str | Path | None, settings: Mapping[str, JSON], kind: type[RunConfig] = RunConfig
) -> RunConfig:
    """Read the run file, apply the flat settings over it, check the result.

    A setting of the file without effect in this run is kept, see `listed_inactive`; one of `settings` is
    refused.

    Raises:
        ConfigError: one sentence about the first error.
    """
    values = read_toml(Path(run_file)) if run_file is not None else {}
    if run_file is not None:
        # Without the settings first, so that an error in the file is reported as the file's.
        parse(kind, values, source=str(run_file))
    source = "the settings given" if run_file is None else f"{run_file} with the settings given"
    merged = merge(kind, values, by_section(kind, settings))
    config = parse(kind, merged, source=source)
    refuse_inactive(config, settings, source=source)
    return parse(kind, _with_iterations(config, merged), source=source) if config.counts_epochs else config


def _with_iterations(config: RunConfig, values: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """The values of a run with as many iterations as its epochs have, in place of these.

    Raises:
        UserError: the file of prompts cannot be read.
    """
    data, rollout, own = config.data, config.rollout, values.get(SFT, {})
    prompts = file_source(data.prompt_data, data.columns, split=config.env.train_split)
    assert prompts.num_tasks is not None, "a file has rows"
    number = math.ceil(config.sft.num_epoch * prompts.num_tasks / rollout.prompts)
    rest = {name: value for name, value in own.items() if name != EPOCHS} if isinstance(own, dict) else {}
    return merge(type(config), {**values, SFT: rest}, by_section(type(config), rollout.iterations(number)))


def load_run(
    run: str | Path | None, settings: Mapping[str, JSON], kind: type[RunConfig] = RunConfig
) -> RunConfig:
    """The configuration of a run file, or of the folder of a run, with the flat settings laid over it.

    kind: as which command reads it.

    Raises:
        ConfigError: a setting is wrong; the folder holds no run.
    """
    path = None if run is None else Path(run)
    if path is not None and not path.exists() and str(run) in env_ids():
        raise ConfigError(
            f"there is no run file {run}; it is an environment: set env in a run file, or use "
            f"`agentrl train --env {run}` (in Python, env={str(run)!r})."
        )
    if path is None or not path.is_dir():
        return load_config(path, settings, kind)
    read_run(path, kind)
    # The folder may have been moved or renamed.
    home: dict[str, JSON] = {"output_dir": str(path.absolute().parent), "name": path.absolute().name}
    return load_config(path / "config.toml", {**settings, **home}, kind)


def read_run(folder: Path, kind: type[RunConfig] = RunConfig) -> RunConfig:
    """The configuration that a run wrote into its folder.

    Raises:
        ConfigError: there is none, or it is of another version.
    """
    path = folder / "config.toml"
    if not path.exists():
        raise ConfigError(f"{folder} holds no run: there is no config.toml in it; name the folder of a run.")
    return parse(kind, read_written(path), source=str(path))


def listed_inactive(config: RunConfig) -> Iterator[str]:
    """A line for each reason why settings of the run file have no effect."""
    sections: list[Section] = [getattr(config, name) for name in RunConfig.model_fields]
    names: dict[str, list[str]] = {}
    for name, change in config.inactive.items():
        if any(section.was_set(name) for section in sections):
            names.setdefault(change.partition(";")[0], []).append(name)
    yield from (f"No effect here: {', '.join(keys)} ({reason})." for reason, keys in names.items())
