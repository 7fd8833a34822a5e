"""The servers of a run, checked without starting one: their arguments, and how many GPUs they need."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from agentrl.assembly.cards import Serving
from agentrl.assembly.config import RunConfig
from agentrl.assembly.fleet import FleetPlan, ServedAdapters, model_plan
from agentrl.engine.config import EngineConfig
from agentrl.processes.gpus import own_gpus

_FROM_MODEL = "--model-path"


class ServerCheck(NamedTuple):
    """The servers that a run starts.

    num_gpus: of all of them (count). commands: the arguments of each group, by its name. missing: what is not
    installed here.
    """

    num_gpus: int = 0
    commands: Mapping[str, str] = {}
    missing: tuple[str, ...] = ()


async def check_servers(config: RunConfig, model: Path, serving: Serving) -> ServerCheck:
    """Check the arguments of the servers that a run starts against the installed SGLang.

    On a machine without GPUs, SGLang may be missing where the servers need GPUs. model: the policy's.
    serving: how large its servers are.

    Raises:
        ConfigError: an argument does not exist, a model is missing, or SGLang is not installed.
    """
    engine = config.engine
    policy = FleetPlan(
        model=model,
        config=engine,
        folder=Path(),
        on_event=_ignore,
        max_in_flight=serving.max_in_flight,
        arguments=serving.arguments,
        adapters=ServedAdapters.of(config),
    )
    plans = dict(_plans(config, policy))
    if not plans or config.rollout.replay is not None:
        return ServerCheck()
    required = sum(
        group.num_engines * plan.config.gpus_of(group)
        for plan in plans.values()
        for group in plan.config.groups
    )
    if required and not own_gpus() and not _is_installed(engine):
        missing = "SGLang is not installed here, so the arguments of servers were not checked."
        return ServerCheck(required, {}, (missing,))
    commands = {
        f"{name}, {which}": " ".join(command[command.index(_FROM_MODEL) :])
        for name, plan in plans.items()
        for which, command in (await plan.commands()).items()
    }
    return ServerCheck(required, commands)


def _plans(config: RunConfig, policy: FleetPlan) -> Iterator[tuple[str, FleetPlan]]:
    """The plans of all servers that the run starts, by the names of their models. policy: its own."""
    engine, folder = config.engine, Path()
    if engine.engine == "sglang" and engine.sglang_url is None:
        yield "policy", policy
        if config.has_eval_engine:
            yield "evaluations", policy
    for name in engine.sglang_models:
        yield name, model_plan(engine, name, folder, _ignore)


def _is_installed(engine: EngineConfig) -> bool:
    is_own = engine.sglang_python is None or Path(engine.sglang_python) == Path(sys.executable)
    return find_spec("sglang") is not None if is_own else True


def _ignore(event: str) -> None:
    del event
