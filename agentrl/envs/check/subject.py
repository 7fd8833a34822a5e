"""What a check plays: an environment by its id, its class or a function, and tasks of its splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias, cast

from agentrl.envs.base import BaseEnv, Env, tasks_of
from agentrl.envs.check.probes.task_probe import Splits, subsampled
from agentrl.envs.multi_agent import AgentView, AnyEnv, MultiAgentEnv
from agentrl.envs.registry import find, path_of
from agentrl.errors import UserError
from agentrl.tools.secrets import with_secrets
from agentrl.types import Task

CheckedEnv: TypeAlias = str | type[AnyEnv] | Callable[[], AnyEnv]
"""The id or the path of an environment, its class, or a function that makes an instance."""


def named(env: CheckedEnv, kwargs: Mapping[str, object]) -> tuple[str, Callable[[], AnyEnv]]:
    """The name of the environment in the report, and what makes its instances.

    Raises:
        UnknownEnvError: no environment of that name.
        UserError: it is an instance, or `kwargs` fit neither the class nor a function.
    """
    if isinstance(env, str | type):
        path = env if isinstance(env, str) else path_of(env)
        return path, find(path).factory(**with_secrets(kwargs))
    if isinstance(env, BaseEnv) or not callable(env):
        raise UserError(
            f"a check plays new instances, got {env!r:.60}; pass an id, the class, or a function that makes "
            "an instance."
        )
    if kwargs:
        raise UserError(
            "env_kwargs have no effect with a function that makes the environment; pass the class."
        )
    name = getattr(env, "__qualname__", type(env).__name__)
    return name, partial(_made, name, env)


def _made(name: str, make: Callable[[], AnyEnv]) -> AnyEnv:
    env: object = make()
    if not isinstance(env, BaseEnv):
        raise UserError(f"{name} makes {env!r:.60}, which is no agentrl.Env; return an instance of one.")
    made = cast(AnyEnv, env)
    made.id = made.id or name
    return made


def view_of(make: Callable[[], MultiAgentEnv], agent: str) -> Env:
    """A new instance as one agent sees it, while scripts play the others."""
    return AgentView(make(), agent)


def splits_of(env: Env) -> Splits:
    """The tasks of each split, evenly spaced ones of very many."""
    return {name: subsampled(tasks_of(env, name)) for name in env.splits}


def chosen(splits: Splits, n: int, seed: int) -> tuple[Task, ...]:
    """`n` tasks to play, from all splits in equal numbers."""
    rng = random.Random(seed)
    drawn = [rng.sample(list(tasks), min(len(tasks), n)) for tasks in splits.values() if tasks]
    longest = max(map(len, drawn), default=0)
    interleaved = [tasks[k] for k in range(longest) for tasks in drawn if k < len(tasks)]
    return tuple(interleaved[:n])
