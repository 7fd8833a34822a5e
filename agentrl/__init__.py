"""agentrl: an agent gym on top of an RL engine.

Everything public is here. `train` and `evaluate` import torch when they are first used, so
that `import agentrl` stays light for those who only write environments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.envs import (
    Env,
    GroupReward,
    Reward,
    Script,
    ScriptedAgent,
    SingleTurnEnv,
    Tags,
    ToolEnv,
    env_ids,
    exact_match,
    make,
    play,
    register,
)
from agentrl.envs.check import check_env
from agentrl.envs.gym import GymEnv
from agentrl.envs.registry import tell_gymnasium_of_all
from agentrl.errors import AgentRLError, ToolRejected, UserError
from agentrl.tools import tool
from agentrl.types import Episode, Limits, Message, Step, Task, ToolCall, Verdict, call, say

if TYPE_CHECKING:
    from agentrl.evaluation.model import evaluate
    from agentrl.run import train

__all__ = [
    "AgentRLError",
    "Env",
    "Episode",
    "GroupReward",
    "GymEnv",
    "Limits",
    "Message",
    "Reward",
    "Script",
    "ScriptedAgent",
    "SingleTurnEnv",
    "Step",
    "Tags",
    "Task",
    "ToolCall",
    "ToolEnv",
    "ToolRejected",
    "UserError",
    "Verdict",
    "call",
    "check_env",
    "env_ids",
    "evaluate",
    "exact_match",
    "make",
    "play",
    "register",
    "say",
    "tool",
    "train",
]

tell_gymnasium_of_all()


def __getattr__(name: str) -> object:
    if name == "train":
        from agentrl.run import train

        return train
    if name == "evaluate":
        from agentrl.evaluation.model import evaluate

        return evaluate
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
