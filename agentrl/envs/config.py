"""Settings of a run for its environment: frozen opponents, and the limits of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from agentrl.config import ImportPath, Section, Spelling, renamed

Seconds = Annotated[float, Field(ge=0.0)]

SCRIPT = "script"


class OpponentChoice(Section):
    """Frozen agents of an environment with several agents."""

    opponents: dict[str, str] = Field(default_factory=dict)
    """What plays agents that are not trained, by name: `script` (the environment's own), a chat endpoint
    (http://127.0.0.1:30000/v1), a model of [engine.sglang_models] or a Hugging Face directory; the policy
    plays all others (a table; as a flag: JSON)."""


class RewardChoice(Section):
    """Rewards of a run, besides those of its environment."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        "custom_rm_path": renamed("reward"),
        "reward_fn_path": renamed("reward"),
    }

    reward: str | None = None
    """Reward of an answer, for environments that take one (SingleTurn-v0): exact_match, f1, number, choice,
    or package.module:function of a task and an answer; left out, the environment's own."""
    group_reward: ImportPath | None = None
    """Reward that compares siblings, in addition to the environment's own (package.module:function): from the
    episodes of a group to one number for each; or a GroupReward, which has a weight."""


class GenerateChoice(Section):
    """Who drives an episode."""

    custom_generate_function_path: ImportPath | None = None
    """Async function that plays an episode in its own way (package.module:function), in training and in
    evaluations, with the environment and the agent of the run; left out, turn by turn."""


class LimitChoice(Section):
    """Limits of an episode in place of the environment's own, see `Limits`; 0 = no limit."""

    reset_timeout_s: Seconds | None = None
    """Longest reset (seconds; 0 = any); left out, the environment's own limit."""
    tool_timeout_s: Seconds | None = None
    """Longest call of a tool (seconds; 0 = any); left out, the environment's own limit."""
    step_timeout_s: Seconds | None = None
    """Longest step (seconds; 0 = any); left out, the environment's own limit."""
    reward_timeout_s: Seconds | None = None
    """Longest reward function (seconds; 0 = any); left out, the environment's own limit."""
    episode_timeout_s: Seconds | None = None
    """Longest episode (seconds; 0 = any); left out, the environment's own limit."""
    max_tool_chars: Annotated[int, Field(ge=0)] | None = None
    """Most characters of one tool's answer (count; 0 = any); left out, the environment's own limit."""

    def chosen(self, *, max_turns: int | None, max_tokens: int | None) -> Mapping[str, float | None]:
        """The fields of `Limits` that are chosen, None = no limit; the arguments, where not None."""
        others = {name: getattr(self, name) for name in LimitChoice.model_fields}
        own = {"max_turns": max_turns, "max_tokens": max_tokens}
        return {name: value or None for name, value in {**others, **own}.items() if value is not None}
