"""Own arguments of SGLang and of its router: from a mapping, checked against the installed version, to a
command line.

    {"mem_fraction_static": 0.3, "disable_cuda_graph": True, "cuda_graph_bs": [1, 2]}
    --mem-fraction-static 0.3 --disable-cuda-graph --cuda-graph-bs 1 2

The interpreter that runs the servers determines which arguments exist: `installed` runs a probe in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.engine.sglang.launch import probe
from agentrl.errors import ConfigError, did_you_mean
from agentrl.runtime.files import private_cache

Value = bool | int | float | str | Sequence[int | float | str]
"""True: a switch that is on. False: one that is off. A sequence: several values."""

_PROBE_S = 300.0
_MAX_EXCERPT_CHARS = 200
Package = Literal["sglang", "sglang_router"]
"""Whose arguments they are, as Python imports it."""
_NAMES: Mapping[Package, str] = {"sglang": "SGLang", "sglang_router": "sglang-router"}
_NO_KEY = "servers on other machines get a key of the run's, and those that listen on 127.0.0.1 need none"
_UNLIKE_THE_POLICY = (
    "tokens that only the draft model prefers would be trained as the policy's own; leave it out"
)
_OURS_OF_SERVERS = {
    "--speculative-accept-threshold-single": _UNLIKE_THE_POLICY,
    "--speculative-accept-threshold-acc": _UNLIKE_THE_POLICY,
    "--model-path": "set hf_checkpoint, the folder that the servers load",
    "--host": "servers listen on 127.0.0.1, and on other machines of a cluster on the address that Ray knows",
    "--port": "a free one is chosen for each server",
    "--device": "set num_gpus_per_engine of a group, or rollout_num_gpus_per_engine (0 = the CPU)",
    "--base-gpu-id": "set CUDA_VISIBLE_DEVICES, whose GPUs are divided among ranks and servers",
    "--disaggregation-mode": "set worker_type of a group in sglang_groups",
    "--disaggregation-bootstrap-port": "a free one is chosen for each server that prefills",
    **dict.fromkeys(
        ("--nnodes", "--node-rank", "--dist-init-addr"),
        "set num_gpus_per_node: a server with more GPUs is spread over several machines",
    ),
    "--weight-version": "it counts the trainer's updates, from 0",
    "--config": "write its arguments next to this one",
    "--grpc-mode": "requests to servers use HTTP",
    "--api-key": _NO_KEY,
    "--admin-api-key": _NO_KEY,
    "--ssl-keyfile": "servers that are started here use plain HTTP on this machine",
    "--ssl-certfile": "servers that are started here use plain HTTP on this machine",
    "--help": "see `python -m sglang.launch_server --help` of the interpreter that runs the servers",
}
_ADDED = "the run adds its servers, and removes those that end"
_RESENT = (
    "the run sends a request again, and counts it, since one with sampled tokens is no other's to repeat"
)
_NO_ROUTER_KEY = "a router that players elsewhere reach gets a key of the run's, and others need none"
_OURS_OF_ROUTERS = {
    "--host": "it listens on 127.0.0.1, or where players are elsewhere on the address that Ray knows",
    "--port": "a free one is chosen",
    "--prometheus-host": "its metrics are on 127.0.0.1, at a free port",
    "--prometheus-port": "its metrics are on 127.0.0.1, at a free port",
    **dict.fromkeys(("--worker-urls", "--prefill", "--decode", "--service-discovery"), _ADDED),
    "--pd-disaggregation": "set worker_type of groups in sglang_groups",
    "--mini-lb": "servers are added to a router that runs, and this one takes none",
    "--backend": "its servers are SGLang's",
    "--disable-retries": _RESENT,
    "--retry-max-retries": _RESENT,
    **dict.fromkeys(("--api-key", "--control-plane-api-keys"), _NO_ROUTER_KEY),
    **dict.fromkeys(("--tls-cert-path", "--tls-key-path"), "requests to it use plain HTTP"),
}
_OURS: Mapping[Package, Mapping[str, str]] = {
    "sglang": _OURS_OF_SERVERS,
    "sglang_router": _OURS_OF_ROUTERS,
}


class Argument(BaseModel):
    """One argument: its names, the number of its values, and their choices where limited."""

    model_config = ConfigDict(frozen=True)

    options: tuple[str, ...]
    takes: Literal["nothing", "one", "several"]
    choices: tuple[str, ...] | None = None


class Arguments(BaseModel):
    """The arguments of one version of a package."""

    model_config = ConfigDict(frozen=True)

    version: str
    arguments: tuple[Argument, ...]
    package: Package = "sglang"

    def command_line(self, values: Mapping[str, Value], defaults: Mapping[str, Value]) -> list[str]:
        """The command line of `values`, and of those `defaults` that this version has and `values` lacks.

        Raises:
            ConfigError: an argument that this version does not have, one that agentrl sets, or an invalid
                value.
        """
        by_option = {option: argument for argument in self.arguments for option in argument.options}
        selected: dict[Argument, tuple[str, Value]] = {}
        for name, value in values.items():
            argument = self._argument_of(name, by_option)
            if argument in selected:
                raise ConfigError(
                    f"{self._name}'s `{selected[argument][0]}` and `{name}` are one argument; leave one out."
                )
            selected[argument] = (name, value)
        for name, value in defaults.items():
            if (default := by_option.get(_option(name))) is not None:
                selected.setdefault(default, (name, value))
        return [part for argument, pair in selected.items() for part in self._format(argument, *pair)]

    def has(self, name: str) -> bool:
        """Whether this version has an argument."""
        return any(_option(name) in argument.options for argument in self.arguments)

    @property
    def _name(self) -> str:
        return _NAMES[self.package]

    def _argument_of(self, name: str, by_option: Mapping[str, Argument]) -> Argument:
        argument = by_option.get(_option(name))
        if argument is None:
            names = [option.removeprefix("--").replace("-", "_") for option in by_option]
            unknown = _option(name).removeprefix("--").replace("-", "_")
            raise ConfigError(
                f"{self._name} {self.version} has no argument `{name}`.{did_you_mean(unknown, names)}"
            )
        reasons = _OURS[self.package]
        if ours := next((reasons[option] for option in argument.options if option in reasons), None):
            raise ConfigError(f"{self._name}'s argument `{name}` is set by agentrl: {ours}.")
        return argument

    def _format(self, argument: Argument, name: str, value: Value) -> list[str]:
        option, what = _option(name), f"{self._name}'s argument `{name}`"
        if isinstance(value, bool):
            return self._switched(argument, option, value)
        texts = [str(value)] if isinstance(value, str | int | float) else [str(entry) for entry in value]
        if argument.takes == "nothing":
            raise ConfigError(f"{what} is a switch: write true or false, not {value!r}.")
        if not texts or (len(texts) > 1 and argument.takes == "one"):
            raise ConfigError(f"{what} takes one value, not {len(texts)}.")
        choices = argument.choices
        if invalid := [text for text in texts if choices is not None and text not in choices]:
            raise ConfigError(f"{what} cannot be {invalid[0]!r}.{did_you_mean(invalid[0], choices or ())}")
        # A separate value with a leading dash would be parsed as an option.
        return [f"{option}={texts[0]}"] if len(texts) == 1 else [option, *texts]

    def _switched(self, argument: Argument, option: str, on: bool) -> list[str]:
        negated = f"--no-{option.removeprefix('--')}"
        if argument.takes != "nothing" and on:
            raise ConfigError(
                f"{self._name}'s argument `{option.removeprefix('--')}` needs a value, not true."
            )
        if on:
            return [option]
        return [negated] if negated in argument.options else []


def from_flags(arguments: Sequence[str], prefix: str = "--sglang-") -> dict[str, Value]:
    """Flags as arguments: `--sglang-mem-fraction-static 0.3 --sglang-disable-cuda-graph`.

    A flag without a value is True, with several it is a list; `--sglang-NAME=VALUE` is one value.
    prefix: of all of them, before the names.

    Raises:
        ConfigError: a value that belongs to no such flag.
    """
    flags: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith(prefix):
            flag, equals, value = argument.partition("=")
            name = flag.removeprefix(prefix).replace("-", "_")
            flags[name] = [value] if equals else []
        elif name:
            flags[name].append(argument)
        else:
            raise ConfigError(f"{argument!r} belongs to no flag; write {prefix}NAME before it.")
    return {name: _value(values) for name, values in flags.items()}


def _value(texts: list[str]) -> Value:
    return True if not texts else texts[0] if len(texts) == 1 else texts


def _option(name: str) -> str:
    return "--" + name.removeprefix("--").replace("_", "-")


_cache: dict[tuple[str, str, Package], Arguments] = {}


async def installed(python: Path, environment: Mapping[str, str], package: Package = "sglang") -> Arguments:
    """The arguments of the SGLang, or of the router, that `python` runs in `environment`.

    Each is probed once per process. The answer is kept for later ones, until a file of the package changes.

    Raises:
        ConfigError: it is not installed there, or the probe failed.
    """
    key = (str(python), environment.get("PYTHONPATH", ""), package)
    if key not in _cache:
        _cache[key] = await _probe_arguments(python, environment, package)
    return _cache[key]


async def _probe_arguments(python: Path, environment: Mapping[str, str], package: Package) -> Arguments:
    kept = private_cache("sglang-arguments")
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            str(Path(probe.__file__)),
            package,
            *([] if kept is None else [str(kept)]),
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
    except TimeoutError:
        raise ConfigError(
            f"{python} did not report {_NAMES[package]}'s arguments in {_PROBE_S:g} s; see whether "
            f"`{python} -c 'import {package}'` hangs."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.split(b"\n") if process.returncode == 0 else err.split(b"\n")
    last_line = next((line for line in reversed(lines) if line.strip()), b"")
    try:
        return Arguments.model_validate_json(last_line).model_copy(update={"package": package})
    except ValidationError:
        excerpt, name = last_line.decode("utf-8", "replace")[:_MAX_EXCERPT_CHARS], _NAMES[package]
        raise ConfigError(
            f"{python} does not report {name}'s arguments ({excerpt}); install {name} there (with a GPU: "
            "pip install 'agentrl[sglang]'), or name the Python interpreter that it is installed for."
        ) from None
