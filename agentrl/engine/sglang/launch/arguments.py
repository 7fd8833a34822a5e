"""SGLang's own arguments: a mapping, checked against the installed version, becomes words of a command line.

    {"mem_fraction_static": 0.3, "disable_cuda_graph": True, "cuda_graph_bs": [1, 2]}
    --mem-fraction-static 0.3 --disable-cuda-graph --cuda-graph-bs 1 2

Which there are, only the interpreter knows that will run the servers: `installed` asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.engine.sglang.launch import probe
from agentrl.errors import ConfigError, did_you_mean

Value = bool | int | float | str | Sequence[int | float | str]
"""True: a switch that is on. False: one that is off. A sequence: several words."""

FLAG = "--sglang-"
_PROBE_S = 300.0
_SHOWN_CHARACTERS = 200
_OURS = {
    "--model-path": "set `model`, the folder that the servers load",
    "--host": "servers that are started here listen on 127.0.0.1",
    "--port": "a free one is chosen for each server",
    "--device": "set `device`",
    "--base-gpu-id": "set `gpus`, which are shared out among the servers",
    "--disaggregation-mode": "set `role`",
    "--disaggregation-bootstrap-port": "a free one is chosen for each server that prefills",
    "--weight-version": "it counts the trainer's updates, from 0",
    "--config": "write its arguments beside this one",
    "--grpc-mode": "servers are spoken to over HTTP",
    "--ssl-keyfile": "servers that are started here speak plain HTTP on this machine",
    "--ssl-certfile": "servers that are started here speak plain HTTP on this machine",
    "--help": "see `python -m sglang.launch_server --help` of the interpreter that runs the servers",
}


class Argument(BaseModel):
    """One argument of SGLang: its names, how many words it takes, and which where those are counted."""

    model_config = ConfigDict(frozen=True)

    options: tuple[str, ...]
    takes: Literal["nothing", "one", "several"]
    choices: tuple[str, ...] | None = None


class Arguments(BaseModel):
    """What one version of SGLang takes."""

    model_config = ConfigDict(frozen=True)

    version: str
    arguments: tuple[Argument, ...]

    def words(self, given: Mapping[str, Value], defaults: Mapping[str, Value]) -> list[str]:
        """The command line of `given`, and of those `defaults` that this version knows and `given` lacks.

        Raises:
            ConfigError: an argument that this version does not know, one that is set here, a value that does
                not fit.
        """
        known = {option: one for one in self.arguments for option in one.options}
        chosen: dict[Argument, tuple[str, Value]] = {}
        for name, value in given.items():
            argument = self._found(name, known)
            if argument in chosen:
                raise ConfigError(
                    f"SGLang's `{chosen[argument][0]}` and `{name}` are one argument; leave one out."
                )
            chosen[argument] = (name, value)
        for name, value in defaults.items():
            if (default := known.get(_option(name))) is not None:
                chosen.setdefault(default, (name, value))
        return [word for argument, pair in chosen.items() for word in _written(argument, *pair)]

    def _found(self, name: str, known: Mapping[str, Argument]) -> Argument:
        argument = known.get(_option(name))
        if argument is None:
            names = [option.removeprefix("--").replace("-", "_") for option in known]
            wrong = _option(name).removeprefix("--").replace("-", "_")
            raise ConfigError(f"SGLang {self.version} has no argument `{name}`.{did_you_mean(wrong, names)}")
        if ours := next((_OURS[option] for option in argument.options if option in _OURS), None):
            raise ConfigError(f"SGLang's argument `{name}` is set by agentrl: {ours}.")
        return argument


def from_flags(words: Sequence[str]) -> dict[str, Value]:
    """Flags as arguments: `--sglang-mem-fraction-static 0.3 --sglang-disable-cuda-graph`.

    A flag without a word is True, with several it is a list; `--sglang-NAME=WORD` is one word.

    Raises:
        ConfigError: a word that belongs to no such flag.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith(FLAG):
            flag, equals, value = word.partition("=")
            name = flag.removeprefix(FLAG).replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            raise ConfigError(f"{word!r} belongs to no flag; write {FLAG}NAME before it.")
    return {name: _value(values) for name, values in found.items()}


def _value(words: list[str]) -> Value:
    return True if not words else words[0] if len(words) == 1 else words


def _option(name: str) -> str:
    return "--" + name.removeprefix("--").replace("_", "-")


def _written(argument: Argument, name: str, value: Value) -> list[str]:
    option = _option(name)
    if isinstance(value, bool):
        return _switched(argument, option, value)
    words = [str(value)] if isinstance(value, str | int | float) else [str(word) for word in value]
    if argument.takes == "nothing":
        raise ConfigError(f"SGLang's argument `{name}` is a switch: write true or false, not {value!r}.")
    if not words or (len(words) > 1 and argument.takes == "one"):
        raise ConfigError(f"SGLang's argument `{name}` takes one value, not {len(words)}.")
    if strange := [word for word in words if argument.choices is not None and word not in argument.choices]:
        hint = did_you_mean(strange[0], argument.choices or ())
        raise ConfigError(f"SGLang's argument `{name}` cannot be {strange[0]!r}.{hint}")
    # A word that begins with a dash would be taken for an option.
    return [f"{option}={words[0]}"] if len(words) == 1 else [option, *words]


def _switched(argument: Argument, option: str, on: bool) -> list[str]:
    negated = f"--no-{option.removeprefix('--')}"
    if argument.takes != "nothing" and on:
        raise ConfigError(f"SGLang's argument `{option.removeprefix('--')}` needs a value, not true.")
    if on:
        return [option]
    return [negated] if negated in argument.options else []


_asked: dict[tuple[str, str], Arguments] = {}


async def installed(python: Path, environment: Mapping[str, str]) -> Arguments:
    """The arguments of the SGLang that `python` runs in `environment`; each is asked once in a process.

    Raises:
        ConfigError: there is no SGLang, or none that can tell.
    """
    key = (str(python), environment.get("PYTHONPATH", ""))
    if key not in _asked:
        _asked[key] = await _ask(python, environment)
    return _asked[key]


async def _ask(python: Path, environment: Mapping[str, str]) -> Arguments:
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            str(Path(probe.__file__)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
        )
    except OSError as error:
        raise ConfigError(
            f"{python} cannot be run ({error.strerror}); name the Python interpreter that SGLang is "
            "installed for."
        ) from error
    try:
        async with asyncio.timeout(_PROBE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    last = out.split(b"\n") if process.returncode == 0 else err.split(b"\n")
    told = next((line for line in reversed(last) if line.strip()), b"")
    try:
        return Arguments.model_validate_json(told)
    except ValidationError:
        said = told.decode("utf-8", "replace")[:_SHOWN_CHARACTERS]
        raise ConfigError(
            f"{python} does not tell SGLang's arguments ({said}); install SGLang there (with a GPU: "
            "pip install 'agentrl[sglang]'), or name the Python interpreter that it is installed for."
        ) from None
