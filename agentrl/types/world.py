"""Messages, tasks, steps and limits: the data that an environment and an agent exchange."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import PlainSerializer, PlainValidator
from typing_extensions import TypeAliasType

# An explicit TypeAliasType: pydantic does not support an implicitly recursive alias.
JSON = TypeAliasType("JSON", "str | int | float | bool | list[JSON] | dict[str, JSON] | None")
Role = Literal["system", "user", "assistant", "tool"]


class Restart(StrEnum):
    """Why the new prompt does not continue the previous prefix."""

    COMPACTED = "compacted"
    REASONING_STRIPPED = "reasoning_stripped"
    REWRITTEN = "rewritten"
    TOOLS_CHANGED = "tools_changed"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. A malformed call has `error`, which holds the reason.

    name: the tool's name, empty where the model named none.
    arguments: parsed arguments, or None where they could not be parsed.
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
class Text:
    """A part of a message: text."""

    text: str
    type: Literal["text"] = "text"


IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Media types of images. SVG is left out: it can hold scripts."""

_DATA_URL = re.compile(r"data:(?P<media>[\w/+.-]+);base64,(?P<data>[A-Za-z0-9+/=\s]*)")


@dataclass(frozen=True, slots=True)
class Image:
    """A part of a message: an image, as a data URL (RFC 2397, base64).

    The message contains the bytes themselves: the package downloads no images.

    Raises:
        ValueError: `url` is no base64 data URL of one of `IMAGE_TYPES`.
    """

    url: str
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        match = _DATA_URL.fullmatch(self.url)
        if match is None or match["media"] not in IMAGE_TYPES:
            raise ValueError(
                f"an image is a data URL such as data:image/png;base64,..., got {self.url[:40]!r}; the media "
                f"type is one of {', '.join(IMAGE_TYPES)}. Image.of(data, media_type) makes one of bytes."
            )
        try:
            base64.b64decode(match["data"], validate=False)
        except binascii.Error as error:
            raise ValueError(f"the image's data is not base64 ({error}); Image.of(data) encodes it") from None

    @classmethod
    def of(cls, data: bytes, media_type: str = "image/png") -> Image:
        """An image from the bytes of its file."""
        return cls(f"data:{media_type};base64,{base64.b64encode(data).decode()}")

    @property
    def media_type(self) -> str:
        """Its media type, e.g. image/png."""
        return self.url[len("data:") : self.url.index(";")]

    @property
    def data(self) -> bytes:
        """The bytes of the image's file."""
        return base64.b64decode(self.url.partition(",")[2])


Part: TypeAlias = Text | Image


@dataclass(frozen=True, slots=True)
class Message:
    """One message. An assistant message without tool calls is a final answer.

    content: text, or parts: text and images in their order. `text` is the text of either.
    """

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, not role {self.role!r}")
        if isinstance(self.content, list):
            object.__setattr__(self, "content", tuple(self.content))

    @property
    def text(self) -> str:
        """The text of the message, without its images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the message, in their order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))


Observation: TypeAlias = tuple[Message, ...]


class History(tuple[Message, ...]):
    """An observation that replaces all previous messages: the complete prompt of a new trajectory.

    A world that compacts or rewrites the conversation returns one (`Step.restarted`).
    """

    reason: Restart

    def __new__(cls, messages: Iterable[Message], reason: Restart) -> History:
        """The messages of the new prompt, the model's own ones included."""
        history = super().__new__(cls, messages)
        history.reason = reason
        return history

    def __getnewargs__(self) -> tuple[tuple[Message, ...], Restart]:
        """The arguments for copies and pickles."""
        return tuple(self), self.reason


def call(name: str, /, **arguments: JSON) -> Message:
    """The assistant message that calls one tool, as a scripted agent writes it."""
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def say(text: str) -> Message:
    """The assistant message with a final answer."""
    return Message("assistant", text)


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `answer` and `metadata` are for the world, never shown to the model."""

    id: str
    prompt: Observation
    answer: str | None = None
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    split: str = "train"

    @classmethod
    def ask(cls, id: str, question: str, answer: str | None = None, **metadata: JSON) -> Task:
        """A task whose prompt is one question."""
        return cls(id, (Message("user", question),), answer, metadata)


class RewardParts(float):
    """A step's reward as the sum of named parts, which verdicts list separately.

    RewardParts({"correct": 1.0, "style": 0.25}) == 1.25

    total: the sum, where it holds more than the named parts.
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
    """Gymnasium's five values. reward None = not scored, 0.0 = scored as 0."""

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
        """The environment ended the episode."""
        return cls(observation, reward, True, False, info)

    @classmethod
    def cut(cls, *observation: Message, reward: float | None = None, **info: JSON) -> Step:
        """A limit of the environment's own ended the episode."""
        return cls(observation, reward, False, True, info)

    @classmethod
    def restarted(
        cls, *history: Message, reason: Restart = Restart.REWRITTEN, reward: float | None = None, **info: JSON
    ) -> Step:
        """The episode goes on from a history that the environment has rewritten."""
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
    tool calls have time of their own (`agentrl.clocks`).

    max_turns: assistant messages of each agent. max_tokens: prompt, world and policy tokens of one
    trajectory together.
    tool_timeout_s: of one call. step_timeout_s: of a step without its calls, and of all calls of one turn
    together, those of tools with `overrun="world"` excluded. episode_timeout_s: likewise of an episode.
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
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise ValueError(f"{limit.name} must be above 0, got {value}; None means no limit")
