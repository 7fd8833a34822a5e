"""agentrl: an agent gym on top of an RL engine.

This module exports the public API. `train` imports torch when it is called, and `evaluate` when it loads a
model, so that `import agentrl` is fast and works without torch for authors of environments.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.envs import (
    Chat,
    Env,
    GroupReward,
    MultiAgentEnv,
    PettingZooEnv,
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
from agentrl.envs.registry import register_all_with_gymnasium
from agentrl.errors import AgentRLError, ToolRejected, UserError
from agentrl.extras import TRAINING, require
from agentrl.tools import tool
from agentrl.types import (
    JSON,
    Episode,
    Image,
    JointStep,
    Limits,
    Message,
    Step,
    Task,
    Text,
    ToolCall,
    Verdict,
    call,
    say,
)

if TYPE_CHECKING:
    from agentrl.evaluation.model import evaluate
    from agentrl.run import TrainResult
    from agentrl.run.sft import SftResult

__all__ = [
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
    "exact_match",
    "make",
    "play",
    "register",
    "say",
    "sft",
    "tool",
    "train",
]

register_all_with_gymnasium()


def train(
    run: str | Path | None = None, *, resume: bool = False, quiet: bool = False, **settings: JSON
) -> TrainResult:
    """Train an agent with the settings of a run file (TOML); `settings` override them by their leaf names.

        agentrl.train("examples/calculator/run.toml", seed=1)
        agentrl.train(env="Capitals-v0", warm_start_steps=100, num_rollout=20)

        agentrl.train("runs/first", resume=True)

    Ctrl-C stops it cleanly: the weights of the last finished step and the journal are complete.

    Args:
        run: the run file, or the folder of a run that is resumed.
        resume: whether the run of a run file is resumed, where its folder holds one.

    Raises:
        UserError: a setting, the environment or the model is wrong; the message has the remedy.
    """
    require("training", *TRAINING)
    from agentrl.run import train as trained

    return trained(run, resume=resume, quiet=quiet, **settings)


def sft(
    run: str | Path | None = None, *, resume: bool = False, quiet: bool = False, **settings: JSON
) -> SftResult:
    """Fine-tune a model on conversations, or on episodes of a run, with the settings of a run file (TOML).

        agentrl.sft(sft_data="conversations.jsonl", hf_checkpoint="model", num_epoch=3)
        agentrl.sft("examples/sft_then_rl/run.toml")
        agentrl.sft(sft_data="runs/first", min_reward=1.0, hf_checkpoint="runs/first/checkpoint")

    The same run file serves `agentrl.train`, which starts from the result with `hf_checkpoint`.

    Args:
        run: the run file, or the folder of a run that is resumed.
        resume: whether the run of a run file is resumed, where its folder holds one.

    Raises:
        UserError: a setting, the data or the model is wrong; the message has the remedy.
    """
    require("fine-tuning", *TRAINING)
    from agentrl.run.sft import sft as fine_tuned

    return fine_tuned(run, resume=resume, quiet=quiet, **settings)


def __getattr__(name: str) -> object:
    if name == "evaluate":
        from agentrl.evaluation.model import evaluate

        return evaluate
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
