"""What an environment says of itself, as JSON: the part of a report that others call its manifest."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agentrl.envs.base import Env
from agentrl.envs.check.probes.task_probe import Splits
from agentrl.envs.resuming import saves_state
from agentrl.types import JSON

_SERVER = "server"


def declared_by(env: Env, splits: Splits) -> Mapping[str, JSON]:
    """Scores, limits, resources, needs, tools, rewards, tasks by split; and the digest of its source files.

    answers: whether every task has one. offline: whether it needs no server. memory_gb: 1e9 bytes.
    """
    tasks = [task for of_split in splits.values() for task in of_split]
    return {
        "expert_score": env.expert_score,
        "chance_score": env.chance_score,
        "episode_timeout_s": env.limits.episode_timeout_s,
        "max_turns": env.limits.max_turns,
        "num_cpus": env.resources.num_cpus,
        "num_gpus": env.resources.num_gpus,
        "memory_gb": env.resources.memory_gb,
        "needs": list(env.needs),
        "offline": _SERVER not in env.needs,
        "tools": [tool.name for tool in env.tool_schemas],
        "rewards": [reward.name for reward in env.rewards],
        "tasks_by_split": {name: len(of_split) for name, of_split in splits.items()},
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
