"""Arguments of the Python API as a run file holds them: a class as its name, paths as text."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TypeAlias, cast

from agentrl.envs import AnyEnv, BaseEnv
from agentrl.envs.registry import path_of
from agentrl.errors import ConfigError
from agentrl.types import JSON

Setting: TypeAlias = JSON | PathLike[str] | type[AnyEnv]
"""A setting as Python code gives it."""

_IDS = '`agentrl envs list` lists the ids, such as "HopSearch-v0"'


def plain_settings(settings: Mapping[str, Setting]) -> dict[str, JSON]:
    """Settings by their leaf names, as plain values.

    Raises:
        ConfigError: `env` names no environment.
        UserError: it is a class of another kind.
    """
    return {name: env_name(value) if name == "env" else _plain(value) for name, value in settings.items()}


def env_name(env: object) -> str:
    """The id of an environment, or the path `module:Class` of its class.

    Raises:
        ConfigError: it is neither an id nor a class.
        UserError: it is a class of another kind.
    """
    if isinstance(env, str):
        return env
    if isinstance(env, type):
        return path_of(env)
    if isinstance(env, BaseEnv):
        name = type(env).__name__
        raise ConfigError(
            f"env is an instance of {name}, and every episode makes one of its own; pass the class, "
            f"env={name}, and its arguments as env_kwargs."
        )
    if callable(env):
        raise ConfigError(
            "env is a function, and a run records its environment by name; pass the class, and its arguments "
            "as env_kwargs."
        )
    raise ConfigError(f"env = {_text(env)} names no environment; pass its id or its class ({_IDS}).")


def run_path(run: object, call: str) -> str | None:
    """The path of a run file or of a run's folder. call: the name of the caller, for the sentence.

    Raises:
        ConfigError: it is no path.
    """
    if run is None or isinstance(run, str | PathLike):
        return None if run is None else fspath(run)
    if isinstance(run, type | BaseEnv):
        raise ConfigError(
            f"the first argument of agentrl.{call} is a run file or the folder of a run; an environment is a "
            f"setting: agentrl.{call}(env=...)."
        )
    raise ConfigError(
        f"run = {_text(run)} is no path; name a run file, as in agentrl.{call}('run.toml'), or leave it out "
        f"and pass settings, as in agentrl.{call}(env='HopSearch-v0')."
    )


def model_path(model: object) -> str | None:
    """The path of a model's directory.

    Raises:
        ConfigError: it is no path.
    """
    if model is None or isinstance(model, str | PathLike):
        return None if model is None else fspath(model)
    raise ConfigError(
        f"model = {_text(model)} is no path; name a Hugging Face model directory, such as "
        "'runs/quickstart/checkpoint', or an endpoint with openai_url and openai_model."
    )


def _plain(value: Setting) -> JSON:
    # The configuration refuses what is no JSON, with the setting's name.
    return fspath(value) if isinstance(value, PathLike) else cast(JSON, value)


def _text(value: object) -> str:
    """A value as a sentence shows it: short, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
