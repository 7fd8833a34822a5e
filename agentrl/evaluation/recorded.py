"""The environment of recorded episodes: of the run, or the eval-only run, whose folder holds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.assembly.env import EnvFactory, env_factory, run_env_factory
from agentrl.assembly.trust import read_trusted
from agentrl.config import Section, parse
from agentrl.envs.config import GenerateChoice
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalSettings
from agentrl.types import JSON


class _EvalFolder(Section):
    """The section of an eval-only run that decides its environment."""

    eval: EvalSettings = EvalSettings()
    """Settings of the episodes."""


def recorded_env(
    folder: Path,
    recorded_id: str,
    env_id: str | None,
    env_kwargs: Mapping[str, JSON] | None,
    *,
    remedy: str = "restore that file",
) -> tuple[EnvFactory, GenerateChoice]:
    """The environment of a run, of an eval-only run or of a cell of a benchmark, and the path of the function
    that played its episodes; or the named environment.

    recorded_id: of the environment of the episodes. env_id, env_kwargs: None = those of the run.
    remedy: what to do where the folder does not say which those are.

    Raises:
        UserError: the folder has no readable config.toml; there is no such environment, or it does not take
            these arguments.
    """
    if env_id is not None:
        return env_factory(env_id, env_kwargs or {}), GenerateChoice()
    path = folder / "config.toml"
    if not path.exists():
        raise ConfigError(f"{folder} holds no config.toml; {remedy}.")
    values = read_trusted(path)
    if "run" in values:
        config = parse(RunConfig, values, source=str(path))
        if env_kwargs is not None:
            env = config.env.model_copy(update={"env_kwargs": env_kwargs})
            config = config.model_copy(update={"env": env})
        return run_env_factory(config, {}), config.env
    section = parse(_EvalFolder, {"eval": values.get("eval", {})}, source=str(path)).eval
    kwargs = section.env_kwargs if env_kwargs is None else env_kwargs
    make_env = env_factory(recorded_id, kwargs, tools=section, reward=section)
    return make_env, section
