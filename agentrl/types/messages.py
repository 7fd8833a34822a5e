"""Messages: what an agent and an environment write, text, images and tool calls."""

from __future__ import annotations

import base64
import binascii
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, get_args

from typing_extensions import TypeAliasType

from agentrl.errors import did_you_mean

# An explicit TypeAliasType: pydantic does not support an implicitly recursive alias.
JSON = TypeAliasType("JSON", "str | int | float | bool | list[JSON] | dict[str, JSON] | None")
"""A value that JSON can write: what metadata, arguments of tools and settings consist of."""
Role = Literal["system", "user", "assistant", "tool"]
"""The writer of a message, by the words of chat endpoints."""
_ROLES: tuple[str, ...] = get_args(Role)
_FORMS = "write text, or Messages such as Message('user', 'Go on.')"
_QUOTED = 60
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _QUOTED


class Restart(StrEnum):
    """Why the new prompt does not continue the previous prefix."""

    COMPACTED = "compacted"
    PARALLEL = "parallel"
    REASONING_STRIPPED = "reasoning_stripped"
    REWRITTEN = "rewritten"
    SUB_AGENT = "sub_agent"
    TOOLS_CHANGED = "tools_changed"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. A malformed call has `error`, which holds the reason.

    name: the tool's name, empty where the model named none.
    arguments: parsed arguments, or None where they could not be parsed.
    raw: the text the model wrote. id: of the call, which its result repeats; "" = it has none.
    error: one sentence for the model; None = it could be parsed.

    Raises:
        ValueError: it has both arguments and an error, or neither.
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
    """A part of a message: text. Parts are for messages that hold images, too."""

    text: str
    type: Literal["text"] = "text"


IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Media types of images. SVG is left out: it can hold scripts."""

_DATA_URL = re.compile(r"data:(?P<media>[\w/+.-]+);base64,(?P<data>[A-Za-z0-9+/=\s]*)")


@dataclass(frozen=True, slots=True)
class Image:
    """A part of a message: an image, as a data URL (RFC 2397, base64).

    The message contains the bytes themselves: the package downloads no images. `Image.of` makes one of bytes.

    url: `data:image/png;base64,...`.

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
        """An image from the bytes of its file. media_type: one of `IMAGE_TYPES`.

        Raises:
            ValueError: the media type is another one.
        """
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
"""A part of a message's content."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. An assistant message without tool calls is a final answer.

    role: who wrote it. content: text, or parts: text and images in their order. `text` is the text of either.
    reasoning: what the model thought before it, where its format separates that; None = nothing.
    tool_calls: of an assistant message, in their order. tool_call_id: of a result, the `ToolCall.id` that it
    answers. name: of a result, its tool.

    Raises:
        ValueError: there is no such role, the content is neither text nor parts, or a role other than the
            assistant's has calls.
    """

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            roles, near = ", ".join(_ROLES), did_you_mean(str(self.role), _ROLES)
            raise ValueError(f"the role of a message is one of {roles}; got {quoted(self.role)}.{near}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, not role {self.role!r}")
        if not isinstance(self.content, str):
            object.__setattr__(self, "content", _parts(self.content))

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


def _parts(content: object) -> tuple[Part, ...]:
    if isinstance(content, list | tuple) and all(isinstance(part, Text | Image) for part in content):
        return tuple(content)
    raise ValueError(
        f"the content of a message is {quoted(content)}; write text, such as str(value), or a list of Text "
        "and Image"
    )


Observation: TypeAlias = tuple[Message, ...]
"""The new messages that an agent reads before its turn; the first are the complete prompt."""


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


def observation_of(content: object) -> Observation:
    """Messages in the forms in which authors write them: text (of the user), a message, or a list of either.

    A mapping of `role` and `content` is a message, too. A `History` remains one.

    Raises:
        ValueError: it is nothing of this kind.
    """
    if isinstance(content, tuple | list):
        # The usual form comes first: this is called for every turn of every episode.
        if all(isinstance(message, Message) for message in content):
            return content if isinstance(content, tuple) else tuple(content)
    elif isinstance(content, str | Message | Mapping):
        return (_message(content),)
    else:
        raise ValueError(f"it is {quoted(content)}; {_FORMS}")
    return tuple(map(_message, content))


def _message(content: object) -> Message:
    if isinstance(content, Message):
        return content
    if isinstance(content, str):
        return Message("user", content)
    if isinstance(content, Mapping) and content.keys() == {"role", "content"}:
        return Message(**content)
    raise ValueError(f"it holds {quoted(content)}; {_FORMS}")


def quoted(value: object) -> str:
    """A value and its type, for an error message; both are short, whatever the value is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = "a number of many digits"
    return f"{text if len(text) <= _QUOTED else f'{text[:_QUOTED]}...'} ({type(value).__name__})"


def call(name: str, /, **arguments: JSON) -> Message:
    """The assistant message that calls one tool, as a script writes it: `call("find", item="nails")`."""
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def say(text: str) -> Message:
    """The assistant message with a final answer."""
    return Message("assistant", text)
