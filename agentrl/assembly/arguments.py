"""Arguments of the Python API as a run file holds them: a class or a function as its name, rows as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import cast

from agentrl.assembly.given_rows import write_rows
from agentrl.envs import BaseEnv
from agentrl.envs.registry import path_of
from agentrl.errors import ConfigError
from agentrl.runtime.temporary import temporary_folder
from agentrl.tools.names import path_of_object
from agentrl.types import JSON

_DATA = "_data"
"""How the names of settings end that name files of rows."""
_PATH = "path"
"""The key of a set's files, beside settings of its own (`agentrl.data.eval_sets.EvalSet`)."""
_IDS = '`agentrl envs list` lists the ids, such as "HopSearch-v0"'


def plain_settings(settings: Mapping[str, object], data: Callable[[], Path] | None = None) -> dict[str, JSON]:
    """Settings by their leaf names, as plain values.

    A function, or a class of a source of prompts, is recorded as `module:name`. Rows of `prompt_data` and its
    like are written to a file whose name is their hash.

    data: the folder for such files, which may be missing; None = `data` below output_dir.

    Raises:
        ConfigError: `env` names no environment; a function has no name; rows cannot be written.
        UserError: `env` is a class of another kind.
    """
    folder = data or (lambda: Path(cast(str, settings.get("output_dir") or "runs")) / "data")
    functions: dict[str, object] = {}
    plain: dict[str, JSON] = {}
    for name, value in settings.items():
        if name == "env":
            plain[name] = env_name(value)
        elif name.endswith(_DATA):
            plain[name] = _data(name, value, folder)
        elif callable(value):
            path = plain[name] = _function(name, value)
            if functions.setdefault(path, value) is not value:
                raise ConfigError(f"{name}: two functions are called {path}; give them different names.")
        else:
            plain[name] = _plain(value)
    return plain


@contextmanager
def rows_beside(folder: object) -> Iterator[Callable[[], Path]]:
    """Where rows of an evaluation are written: in `data` beside its folder; without one, for the block."""
    with ExitStack() as stack:
        if isinstance(folder, str | PathLike):
            yield lambda: Path(folder).parent / "data"
        else:
            yield lambda: stack.enter_context(temporary_folder("rows"))


def _function(name: str, function: Callable[..., object]) -> str:
    path = path_of_object(function)
    if "<lambda>" in path:
        raise ConfigError(
            f"{name} is a lambda, and a run records its functions by name; write it as a function with def."
        )
    return path


def _data(name: str, value: object, folder: Callable[[], Path]) -> JSON:
    """Paths as they are, and the path of rows; also in a table of sets by name, and of a set's settings."""
    if isinstance(value, Mapping) and _PATH in value:
        own = {key: _function(name, each) if callable(each) else _plain(each) for key, each in value.items()}
        return {**own, _PATH: _data(name, value[_PATH], folder)}
    if isinstance(value, Mapping):
        return {key: _data(f"{name}[{key!r}]", each, folder) for key, each in value.items()}
    if value is None or isinstance(value, str | PathLike | int | float):
        return _plain(value)
    if isinstance(value, list | tuple) and all(isinstance(path, str | PathLike) for path in value):
        return [fspath(path) for path in value]
    return str(write_rows(name, value, folder()))


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


def _plain(value: object) -> JSON:
    # The configuration refuses what is no JSON, with the setting's name.
    return fspath(value) if isinstance(value, PathLike) else cast(JSON, value)


def _text(value: object) -> str:
    """A value as a sentence shows it: short, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
