"""What is said and done: messages, tasks, steps, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from typing_extensions import TypeAliasType

# A named alias: pydantic cannot follow an implicitly recursive one.
JSON = TypeAliasType("JSON", "str | int | float | bool | list[JSON] | dict[str, JSON] | None")
Role = Literal["system", "user", "assistant", "tool"]


class Restart(StrEnum):
    """Why what the model sees is no longer a continuation of what it saw before."""

    COMPACTED = "compacted"
    REASONING_STRIPPED = "reasoning_stripped"
    REWRITTEN = "rewritten"
    TOOLS_CHANGED = "tools_changed"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. Malformed calls are representable: then `error` says why.

    name: the tool's name, empty where the model named none.
    arguments: parsed arguments, or None when they could not be read.
    raw: the text the model wrote.
    """

    name: str
    arguments: Mapping[str, JSON] | None
    raw: str = ""
    id: str = ""
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.arguments is None) == (self.error is None):
            raise ValueError("a ToolCall has either arguments or an error, exactly one of them")


@dataclass(frozen=True, slots=True)
class Message:
    """One message. An assistant message without tool calls is a final answer."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, not role {self.role!r}")


Observation: TypeAlias = tuple[Message, ...]


class History(tuple[Message, ...]):
    """An observation that replaces everything shown before: the whole prompt of a new trajectory.

    A world that compacts or rewrites the conversation answers with one (`Step.restarted`).
    """

    reason: Restart

    def __new__(cls, messages: Iterable[Message], reason: Restart) -> History:
        """The messages, the model's own ones included, as it shall see them from now on."""
        history = super().__new__(cls, messages)
        history.reason = reason
        return history

    def __getnewargs__(self) -> tuple[tuple[Message, ...], Restart]:
        """What a copy is made from."""
        return tuple(self), self.reason


def call(name: str, /, **arguments: JSON) -> Message:
    """The assistant message that calls one tool, as a scripted agent writes it."""
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def say(text: str) -> Message:
    """The assistant message that gives a final answer."""
    return Message("assistant", text)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. `answer` and `metadata` are for the world, never shown to the model."""

    id: str
    prompt: Observation
    answer: str | None = None
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    split: str = "train"

    @classmethod
    def ask(cls, id: str, question: str, answer: str | None = None, **metadata: JSON) -> Task:
        """A task whose whole prompt is one question."""
        return cls(id, (Message("user", question),), answer, metadata)


class RewardParts(float):
    """A step's reward that is the sum of named parts, which verdicts then tell apart.

    RewardParts({"correct": 1.0, "style": 0.25}) == 1.25
    """

    parts: Mapping[str, float]

    def __new__(cls, parts: Mapping[str, float]) -> RewardParts:
        """The sum of the parts, in their order."""
        whole = super().__new__(cls, sum(parts.values()))
        whole.parts = dict(parts)
        return whole

    def __reduce__(self) -> tuple[type[RewardParts], tuple[Mapping[str, float]]]:
        """What a copy is made from."""
        return RewardParts, (self.parts,)


class Step(NamedTuple):
    """Gymnasium's five values. reward None = not scored, 0.0 = scored and worth nothing."""

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Mapping[str, JSON]

    @classmethod
    def going(cls, *observation: Message, reward: float | None = None, **info: JSON) -> Step:
        """The episode goes on."""
        return cls(observation, reward, False, False, info)

    @classmethod
    def finished(cls, *observation: Message, reward: float | None, **info: JSON) -> Step:
        """The world ended: there is nothing left to do."""
        return cls(observation, reward, True, False, info)

    @classmethod
    def cut(cls, *observation: Message, reward: float | None = None, **info: JSON) -> Step:
        """A limit of the world's own ended it."""
        return cls(observation, reward, False, True, info)

    @classmethod
    def restarted(
        cls, *history: Message, reason: Restart = Restart.REWRITTEN, reward: float | None = None, **info: JSON
    ) -> Step:
        """The episode goes on from a history that the world has rewritten."""
        return cls(History(history, reason), reward, False, False, info)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may use. Seconds are wall time; None = no limit of this kind.

    max_turns: assistant messages. max_tokens: prompt, world and policy tokens together.
    max_tool_chars: characters of one tool's answer; what goes beyond is left out, visibly.

    Raises:
        ValueError: a limit that leaves no room for anything.
    """

    max_turns: int = 8
    max_tokens: int | None = 2048
    reset_timeout_s: float | None = 60.0
    tool_timeout_s: float | None = 30.0
    step_timeout_s: float | None = 60.0
    reward_timeout_s: float | None = 30.0
    episode_timeout_s: float | None = 600.0
    max_tool_chars: int | None = 20_000

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise ValueError(f"{limit.name} must be above 0, got {value}; None means no limit")
