"""Tasks, steps and limits: the data that an environment and the episode loop exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from agentrl.types.messages import JSON, History, Message, Observation, Restart, observation_of, quoted


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `answer` and `metadata` are for the world, never shown to the model.

    id: its name, unique among the tasks of all splits; an integer becomes text.
    prompt: the first messages; text becomes a message of the user.
    answer: the right one, where a reward or a grader needs it. metadata: anything else; `BaseEnv.breakdown`
    names one of its keys. split: the split that it belongs to.

    Raises:
        ValueError: the id or the answer is no text, or the prompt holds something else than messages.
    """

    id: str
    prompt: Observation
    answer: str | None = None
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    split: str = "train"

    def __post_init__(self) -> None:
        if isinstance(self.id, Integral) and not isinstance(self.id, bool):
            object.__setattr__(self, "id", str(self.id))
        if not isinstance(self.id, str):
            raise ValueError(f"the id of a task is text or an integer, got {quoted(self.id)}")
        if not isinstance(self.answer, str | None):
            raise ValueError(
                f"the answer of task `{self.id}` is {quoted(self.answer)}; the answer of a model is text, so "
                f"write answer={str(self.answer)!r}, or keep the value in metadata"
            )
        try:
            object.__setattr__(self, "prompt", observation_of(self.prompt))
        except ValueError as error:
            raise ValueError(f"the prompt of task `{self.id}` is wrong: {error}") from None

    @classmethod
    def ask(cls, id: str | int, question: str, answer: str | None = None, **metadata: JSON) -> Task:
        """A task whose prompt is one question, in a message of the user. metadata: as keywords.

        Raises:
            ValueError: as for the class.
        """
        return cls(str(id) if isinstance(id, int) else id, (Message("user", question),), answer, metadata)


class RewardParts(float):
    """A step's reward as the sum of named parts, which verdicts list separately.

    `RewardParts({"correct": 1.0, "style": 0.25})` equals 1.25.

    parts: by name, finite numbers. total: the sum, where it holds more than the named parts.
    """

    parts: Mapping[str, float]

    def __new__(cls, parts: Mapping[str, float], *, total: float | None = None) -> RewardParts:
        """The sum of the parts, in their order."""
        reward = super().__new__(cls, sum(parts.values()) if total is None else total)
        reward.parts = dict(parts)
        return reward

    def __reduce__(self) -> tuple[object, tuple[Mapping[str, float], float]]:
        """The arguments for copies and pickles."""
        return _reward_parts, (self.parts, float(self))


def _reward_parts(parts: Mapping[str, float], total: float) -> RewardParts:
    return RewardParts(parts, total=total)


class Step(NamedTuple):
    """The result of a step: Gymnasium's five values. Its class methods make the four kinds of them.

    These take text in place of a message of the user.

    observation: the new messages, none where the episode has ended without a word; a `History` replaces all
    earlier ones. reward: None = not scored, 0.0 = scored as 0. terminated: the environment has ended the
    episode. truncated: a limit has ended it. info: anything else, for programs; the model never sees it.
    """

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Mapping[str, JSON]

    @classmethod
    def going(cls, *observation: Message | str, reward: float | None = None, **info: JSON) -> Step:
        """The episode goes on."""
        return cls(observation_of(observation), reward, False, False, info)

    @classmethod
    def finished(cls, *observation: Message | str, reward: float | None, **info: JSON) -> Step:
        """The environment ended the episode."""
        return cls(observation_of(observation), reward, True, False, info)

    @classmethod
    def cut(cls, *observation: Message | str, reward: float | None = None, **info: JSON) -> Step:
        """A limit of the environment's own ended the episode: the board is full, the clock has run out.

        The ending is `truncated`, as where a limit of `Limits` ends it. The episode is scored by its rewards
        up to then (`reward` included) and trained on.
        """
        return cls(observation_of(observation), reward, False, True, info)

    @classmethod
    def restarted(
        cls, *history: Message, reason: Restart = Restart.REWRITTEN, reward: float | None = None, **info: JSON
    ) -> Step:
        """The episode goes on from a history that the environment has rewritten.

        history: the complete new prompt, the model's own messages included. It begins a new trajectory, and
        `reason` is counted (`rollout/restarts/REASON`).
        """
        return cls(History(history, reason), reward, False, False, info)


def _reward_from_json(value: object) -> object:
    """A number, null, {"parts": {name: number}, "total": number}, or {agent: any of these}."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(parts := value.get("parts"), Mapping):
        return RewardParts(parts, total=value["total"])
    return {agent: _reward_from_json(reward) for agent, reward in value.items()}


def _reward_to_json(reward: object) -> object:
    if isinstance(reward, RewardParts):
        return {"parts": dict(reward.parts), "total": float(reward)}
    if isinstance(reward, Mapping):
        return {agent: _reward_to_json(own) for agent, own in reward.items()}
    return reward


StepReward: TypeAlias = Annotated[
    float | Mapping[str, float | None] | None,
    PlainValidator(_reward_from_json),
    PlainSerializer(_reward_to_json),
]
"""The reward of a step: one number for all agents, or a number for each agent by name; None = not scored."""


class JointStep(NamedTuple):
    """The result of a step of an environment with several agents.

    observations: for each agent by name; an agent that is not to move receives it at its next turn.
    reward: one number for all agents (a team's), or one for each by name; None, or a missing name = not
    scored.
    terminated, truncated, info: as in `Step`.
    """

    observations: Mapping[str, Observation]
    reward: StepReward
    terminated: bool
    truncated: bool
    info: Mapping[str, JSON] = {}

    @classmethod
    def going(cls, observations: Mapping[str, Observation], reward: StepReward = None) -> JointStep:
        """The episode goes on."""
        return cls(observations, reward, False, False)

    @classmethod
    def finished(cls, reward: StepReward, observations: Mapping[str, Observation] | None = None) -> JointStep:
        """The environment ended the episode."""
        return cls(observations or {}, reward, True, False)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode. None = no limit of this kind.

    Seconds are wall time of the work itself: waits for a slot and pauses of the process do not count, and
    tool calls have time of their own (`agentrl.runtime.clocks`).

    max_turns: assistant messages of each agent (count). max_tokens: prompt, world and policy tokens of one
    trajectory together (count).
    reset_timeout_s: of `reset` (seconds). tool_timeout_s: of one call (seconds). step_timeout_s: of a step
    without its calls, and of all calls of one turn together, those of tools with `overrun="world"` excluded
    (seconds). reward_timeout_s: of a reward (seconds). episode_timeout_s: of all steps, likewise (seconds).
    max_tool_chars: characters of one tool result; a longer one is cut, with a note of that.
    max_calls_per_turn: tool calls of one turn that are executed; the others get an error message.

    Raises:
        ValueError: a limit is not above 0.
    """

    max_turns: int = 8
    max_tokens: int | None = 2048
    reset_timeout_s: float | None = 60.0
    tool_timeout_s: float | None = 30.0
    step_timeout_s: float | None = 60.0
    reward_timeout_s: float | None = 30.0
    episode_timeout_s: float | None = 600.0
    max_tool_chars: int | None = 20_000
    max_calls_per_turn: int | None = 16

    def __post_init__(self) -> None:
        for limit in fields(self):
            value, may_be_off = getattr(self, limit.name), limit.name != "max_turns"
            if value is None and may_be_off:
                continue
            if not (isinstance(value, Real) and float(value) > 0):
                off = "; None means no limit" if may_be_off else ""
                raise ValueError(f"{limit.name} must be above 0, got {value!r}{off}")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process that plays an environment takes of a cluster (`num_rollout_workers`, `cluster = "ray"`).

    They are reserved, and the process sees its GPUs alone; nothing else limits what it uses.

    num_cpus: CPUs (count, may be a fraction). num_gpus: GPUs (count). memory_gb: memory (1e9 bytes); 0 = not
    counted.

    Raises:
        ValueError: num_cpus is not above 0, num_gpus no count, or memory_gb below 0.
    """

    num_cpus: float = 1.0
    num_gpus: int = 0
    memory_gb: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.num_cpus, Real) and float(self.num_cpus) > 0):
            raise ValueError(f"num_cpus must be above 0, got {self.num_cpus!r}")
        if not (isinstance(self.num_gpus, Integral) and int(self.num_gpus) >= 0):
            raise ValueError(f"num_gpus must be a count of 0 or more, got {self.num_gpus!r}")
        if not (isinstance(self.memory_gb, Real) and float(self.memory_gb) >= 0):
            raise ValueError(f"memory_gb must be 0 or more, got {self.memory_gb!r}")
