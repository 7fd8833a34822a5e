"""The public surface: pinned, documented, light, and all that contributed environments may use."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import agentrl
from tests.house.source import name_of, python_files, tree_of

PUBLIC = [
    "AgentRLError",
    "Chat",
    "Env",
    "Episode",
    "GroupReward",
    "GymEnv",
    "Image",
    "JointStep",
    "Limits",
    "Message",
    "MultiAgentEnv",
    "PettingZooEnv",
    "Reward",
    "Script",
    "ScriptedAgent",
    "SingleTurnEnv",
    "Step",
    "Tags",
    "Task",
    "Text",
    "ToolCall",
    "ToolEnv",
    "ToolRejected",
    "UserError",
    "Verdict",
    "call",
    "check_env",
    "env_ids",
    "evaluate",
    "evaluate_async",
    "exact_match",
    "make",
    "open_run",
    "play",
    "register",
    "say",
    "sft",
    "sft_async",
    "tool",
    "train",
    "train_async",
]
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "tensorboard", "matplotlib"}
FOR_AUTHORS = {"agentrl", "agentrl.envs.gateway", "agentrl.envs.graders", "agentrl.tools"}
FOR_LOOPS = FOR_AUTHORS | {
    "agentrl.algorithms.baselines",
    "agentrl.algorithms.estimators",
    "agentrl.algorithms.group_relative",
    "agentrl.algorithms.samples",
    "agentrl.algorithms.tokens",
    "agentrl.algorithms.weights",
    "agentrl.engine.embedded",
    "agentrl.envs",
    "agentrl.losses",
    "agentrl.rendering.inline",
    "agentrl.rollout.agent",
    "agentrl.trainer.config",
    "agentrl.trainer.torch",
    "agentrl.types",
}
"""The modules that authors of training loops may use."""
EXAMPLES = {
    "examples/authors/": FOR_AUTHORS | {"agentrl.envs"},
    "examples/one_page/": FOR_LOOPS,
    "examples/second_look/": FOR_AUTHORS | {"agentrl.envs.generate"},
    "envs_contrib/slime/": FOR_AUTHORS
    | {"agentrl.envs", "agentrl.errors", "agentrl.types", "agentrl.types.seams"},
}
"""What shows more than environments: a training loop, and functions by path."""


def test_the_public_names_are_pinned() -> None:
    assert agentrl.__all__ == PUBLIC
    assert len(PUBLIC) <= 41


def test_every_public_name_has_a_docstring() -> None:
    objects = {name: getattr(agentrl, name) for name in agentrl.__all__}
    needs_docstring = (inspect.isclass, inspect.isfunction)
    assert [
        n for n, obj in objects.items() if any(is_a(obj) for is_a in needs_docstring) and not obj.__doc__
    ] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(agentrl, "no_such_name")


def test_importing_agentrl_stays_light() -> None:
    code = "import sys, agentrl; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) & HEAVY == set()


def imports_of_agentrl(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] == "agentrl")
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "agentrl":
                yield module


def test_contributed_environments_use_the_public_surface_only() -> None:
    used = {name_of(path): set(imports_of_agentrl(path)) for path in python_files("envs_contrib", "examples")}
    allowed = {
        name: next((modules for folder, modules in EXAMPLES.items() if name.startswith(folder)), FOR_AUTHORS)
        for name in used
    }
    assert {name: extra for name, names in used.items() if (extra := names - allowed[name])} == {}
