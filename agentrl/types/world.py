"""Messages, tasks, steps, limits: what an environment and an agent exchange."""

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
class Text:
    """A part of a message: words."""

    text: str
    type: Literal["text"] = "text"


IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Media types of images. SVG is left out: it can hold scripts."""

_DATA_URL = re.compile(r"data:(?P<media>[\w/+.-]+);base64,(?P<data>[A-Za-z0-9+/=\s]*)")


@dataclass(frozen=True, slots=True)
class Image:
    """A part of a message: a picture, as a data URL (RFC 2397, base64).

    The bytes themselves travel with the message: no part of the project fetches an address for it.

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

    content: words, or parts: words and images in their order. `text` is the words of either.
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
        """The words of the message, its images left out."""
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

    total: the sum, where it holds more than the named parts.
    """

    parts: Mapping[str, float]

    def __new__(cls, parts: Mapping[str, float], *, total: float | None = None) -> RewardParts:
        """The sum of the parts, in their order."""
        whole = super().__new__(cls, sum(parts.values()) if total is None else total)
        whole.parts = dict(parts)
        return whole

    def __reduce__(self) -> tuple[object, tuple[Mapping[str, float], float]]:
        """What a copy is made from."""
        return _reward_parts, (self.parts, float(self))


def _reward_parts(parts: Mapping[str, float], total: float) -> RewardParts:
    return RewardParts(parts, total=total)


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


def _reward_from_json(found: object) -> object:
    """A number, null, {"parts": {name: number}, "total": number}, or {agent: any of these}."""
    if not isinstance(found, Mapping):
        return found
    if isinstance(parts := found.get("parts"), Mapping):
        return RewardParts(parts, total=found["total"])
    return {agent: _reward_from_json(reward) for agent, reward in found.items()}


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
"""What a step was worth: to every agent the same number, or a number for each agent by name; None = not
scored."""


class JointStep(NamedTuple):
    """What a step of an environment with several agents returns.

    observations: what each agent is shown, by name; an agent whose turn it is not sees it when its turn
    comes.
    reward: one number for all agents (a team's), or one for each by name; None, or a name left out = not
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
    """What an episode may use. Seconds are wall time; None = no limit of this kind.

    max_turns: assistant messages of each agent. max_tokens: prompt, world and policy tokens of one
    trajectory together.
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
