"""Worlds: what an author writes, the registry that names them, and the one loop that plays them."""

from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.base import Env, Script, tasks_of
from agentrl.envs.dialect import Tags
from agentrl.envs.play import play
from agentrl.envs.registry import EnvSpec, env_ids, find, make, register
from agentrl.envs.scoring import exact_match, squad_normalize, sum_of_steps
from agentrl.envs.tool_env import ToolEnv

__all__ = [
    "Env",
    "EnvSpec",
    "Script",
    "ScriptedAgent",
    "Tags",
    "ToolEnv",
    "env_ids",
    "exact_match",
    "find",
    "make",
    "play",
    "register",
    "squad_normalize",
    "sum_of_steps",
    "tasks_of",
]
