"""What a check plays: an environment by its id, its class or a function; its tasks, and what it declares."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

from agentrl.envs.base import BaseEnv, Env, tasks_of
from agentrl.envs.check.probes.task_probe import Splits, subsampled
from agentrl.envs.multi_agent import AgentView, AnyEnv, MultiAgentEnv
from agentrl.envs.registry import find, path_of
from agentrl.envs.resuming import saves_state
from agentrl.errors import UserError
from agentrl.tools.secrets import with_secrets
from agentrl.types import AGENT, JSON, Task

_SERVER = "server"

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


def seats(make: Callable[[], AnyEnv], example: AnyEnv) -> Mapping[str, Callable[[], Env]]:
    """What makes the environment as each of its agents sees it, by agent; scripts play the others.

    example: an instance. Agents that are a part of the world are not among them.
    """
    if not isinstance(example, MultiAgentEnv):
        return {AGENT: cast(Callable[[], Env], make)}
    several = cast(Callable[[], MultiAgentEnv], make)
    acting = [agent for agent in example.possible_agents if agent not in example.scripted_agents]
    return {agent: partial(_view, several, agent) for agent in acting}


def _view(make: Callable[[], MultiAgentEnv], agent: str) -> Env:
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


def declared_by(env: Env, splits: Splits) -> Mapping[str, JSON]:
    """Scores, limits, resources, needs, tools, rewards, tasks by split; and the digest of its source files.

    answers: whether every task has one. offline: whether it needs no server. memory_gb: 1e9 bytes.
    """
    tasks = [task for of_split in splits.values() for task in of_split]
    return {
        "expert_score": env.expert_score,
        "chance_score": env.chance_score,
        "timeout_s": env.limits.episode_timeout_s,
        "turns": env.limits.max_turns,
        "num_cpus": env.resources.num_cpus,
        "num_gpus": env.resources.num_gpus,
        "memory_gb": env.resources.memory_gb,
        "needs": list(env.needs),
        "offline": _SERVER not in env.needs,
        "tools": [tool.name for tool in env.tool_schemas],
        "rewards": [reward.name for reward in env.rewards],
        # Of many tasks `splits` has a part.
        "tasks_by_split": {name: len(tasks_of(env, name)) for name in env.splits},
        "answers": bool(tasks) and all(task.answer for task in tasks),
        "saves_state": saves_state(env),
        "source_digest": source_digest(type(env)),
    }


def source_digest(kind: type) -> str:
    """SHA-256 (hex) of the source files of a class and of those that it derives from, in their order."""
    files: dict[str, None] = {}
    for parent in kind.__mro__:
        # Classes of the interpreter, or of a prompt, have no file.
        with suppress(TypeError, OSError):
            if file := inspect.getsourcefile(parent):
                files[file] = None
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()
