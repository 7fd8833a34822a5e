"""Settings of a run for its environment: frozen opponents, and the limits of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from agentrl.config import IN_COMMAS, ImportPath, NameOrPath, Needs, Section, Spelling, renamed
from agentrl.tools.secrets import by_reference
from agentrl.types import JSON

Seconds = Annotated[float, Field(ge=0.0)]

EnvArguments = Annotated[dict[str, JSON], by_reference("env_kwargs")]
"""Arguments of an environment's constructor."""

SCRIPT = "script"


class OpponentChoice(Section):
    """Frozen agents of an environment with several agents."""

    opponents: dict[str, str] = Field(default_factory=dict)
    """What plays agents that are not trained, by name: `script` (the environment's own), a chat endpoint
    (http://127.0.0.1:30000/v1), a model of [engine.sglang_models] or a Hugging Face directory; the policy
    plays all others (a table; as a flag: JSON)."""


def _rm_type(name: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
    del before
    return {"reward": "remote" if name == "remote_rm" else name}


def _rm_url(url: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
    table = before.get("reward_kwargs")
    return {"reward": "remote", "reward_kwargs": {**(table if isinstance(table, dict) else {}), "url": url}}


class RewardChoice(Section):
    """Rewards of a run, besides those of its environment."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        "custom_rm_path": renamed("reward"),
        "reward_fn_path": renamed("reward"),
        "rm_type": Spelling("Same as reward; remote_rm = remote.", _rm_type, is_switch=False),
        "rm_url": Spelling("Same as reward = remote, with this url.", _rm_url, is_switch=False),
    }

    reward: NameOrPath | None = None
    """Grader of an answer, for environments that take one (SingleTurn-v0), by name: exact_match, f1, number,
    choice, gpqa, dapo, math, deepscaler, ifeval, code, remote, judge, random, by_row (`agentrl graders
    list`); or package.module:function of a task and an answer; left out, the environment's own."""
    reward_kwargs: Annotated[dict[str, JSON], by_reference("reward_kwargs")] = Field(default_factory=dict)
    """Settings of the grader in reward, such as the url of remote and judge (a table; as a flag: JSON)."""
    env_reward_weight: Annotated[float | None, Needs("reward")] = None
    """Weight of the rewards that an environment has itself, where reward is to score it, too: by the last
    answer of each agent (0 = reward takes their place, 1 = it is added); left out, an environment with
    rewards of its own takes no other."""
    group_reward: NameOrPath | None = None
    """Reward that compares siblings, in addition to the environment's own, by name: pairwise, diversity; or
    package.module:function from the episodes of a group to one number for each, or a GroupReward, which has a
    weight."""
    group_reward_kwargs: Annotated[dict[str, JSON], by_reference("group_reward_kwargs")] = Field(
        default_factory=dict
    )
    """Settings of the grader in group_reward, and its weight (a table; as a flag: JSON)."""

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Settings of a grader, where none is named."""
        unused = {}
        for key in ("reward", "group_reward"):
            name = getattr(self, key)
            if name is None:
                unused[f"{key}_kwargs"] = f"without {key}; add it"
            elif ":" in name:
                unused[f"{key}_kwargs"] = f"with {key} = {name}, a function by its path; name a grader"
        return {**super().without_effect, **unused}


class GenerateChoice(Section):
    """Who drives an episode."""

    custom_generate_function_path: ImportPath | None = None
    """Async function that plays an episode in its own way (package.module:function), in training and in
    evaluations, with the environment and the agent of the run; left out, turn by turn."""
    generate_function_paths: Annotated[tuple[ImportPath, ...], IN_COMMAS] = ()
    """Generate functions that a prompt may ask for, by their paths: in `generate_function_path` of its
    metadata, in place of custom_generate_function_path (a flag: with commas between them). No other one is
    imported for a prompt."""
    rollout_sample_hook_path: ImportPath | None = None
    """Function that sees each episode when it has ended, before its rewards, and may change its counts and
    the rewards of its steps (package.module:function), in training and in evaluations."""

    @property
    def has_generate(self) -> bool:
        """Whether generate functions play some episodes."""
        return self.custom_generate_function_path is not None or bool(self.generate_function_paths)


class LimitChoice(Section):
    """Limits of an episode in place of the environment's own, see `Limits`; 0 = no limit."""

    reset_timeout_s: Seconds | None = None
    """Longest reset (seconds; 0 = any); left out, the environment's own limit."""
    tool_timeout_s: Seconds | None = None
    """Longest call of a tool (seconds; 0 = any); left out, the environment's own limit."""
    step_timeout_s: Seconds | None = None
    """Longest step without its tool calls, and longest time of all calls of one turn together (seconds; 0 =
    any); left out, the environment's own limit."""
    reward_timeout_s: Seconds | None = None
    """Longest reward function (seconds; 0 = any); left out, the environment's own limit."""
    episode_timeout_s: Seconds | None = None
    """Longest episode without its tool calls, and longest time of all its calls together (seconds; 0 = any);
    left out, the environment's own limit."""
    max_tool_chars: Annotated[int, Field(ge=0)] | None = None
    """Most characters of one tool's answer (count; 0 = any); left out, the environment's own limit."""
    max_calls_per_turn: Annotated[int, Field(ge=0)] | None = None
    """Most tool calls of one turn that are executed (count; 0 = any); the others get an error message; left
    out, the environment's own limit."""

    def chosen(self, *, max_turns: int | None, max_tokens: int | None) -> Mapping[str, float | None]:
        """The fields of `Limits` that are chosen, None = no limit; the arguments, where not None."""
        others = {name: getattr(self, name) for name in LimitChoice.model_fields}
        own = {"max_turns": max_turns, "max_tokens": max_tokens}
        return {name: value or None for name, value in {**others, **own}.items() if value is not None}
