"""Dialects as data: the text format of turns between a model and a world.

Inline tags: the world writes into the assistant's own text, as in Search-R1 (arXiv:2503.09516) and
ReTool (arXiv:2504.11536). With `Tags(result="information")` and a tool `search` an episode reads

    <search>Kalor Mendos born</search><information>Kalor Mendos was born in Tirak</information>
    <answer>Tirak</answer>

Rendering turns this into tokens; environments never see tags, only Messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Tags:
    """The names of the tags around an answer of the world and around the final answer.

    A tool's tag is the tool's name: it holds one argument as plain text, several as JSON.
    frame: the format of an answer of the world, with `{}` for its text; left empty,
    `<result> {}</result>` with the name of its tag.

    Raises:
        ValueError: a name that cannot be a tag, both names equal, or a frame that is not the tag's.
    """

    result: str = "result"
    answer: str = "answer"
    frame: str = ""

    def __post_init__(self) -> None:
        for name in (self.result, self.answer):
            if not _NAME.fullmatch(name):
                raise ValueError(f"a tag's name is letters, digits and underscores, got {name!r}")
        if self.result == self.answer:
            raise ValueError(f"result and answer need two different tags, got {self.result!r} for both")
        before, words, after = self.framed("{}").partition("{}")
        if not words or opening(self.result) not in before or closing(self.result) not in after:
            form = f"{opening(self.result)}{{}}{closing(self.result)}"
            raise ValueError(f"the frame must hold {form}, with blanks or lines around, got {self.frame!r}")

    @classmethod
    def search_r1(cls) -> Tags:
        """As in Search-R1 (arXiv:2503.09516): `<information>` on lines of its own, for a tool `search`."""
        return cls("information", frame="\n\n<information>{}</information>\n\n")

    @classmethod
    def retool(cls) -> Tags:
        """As in ReTool (arXiv:2504.11536): `<interpreter>` on lines of its own, for a tool `code`."""
        return cls("interpreter", frame="\n\n<interpreter>\n{}\n</interpreter>\n\n")

    def framed(self, text: str) -> str:
        """An answer of the world as a part of the assistant's text."""
        frame = self.frame or f"{opening(self.result)} {{}}{closing(self.result)}"
        return frame.replace("{}", text, 1)

    def names(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Every tag of an environment with these tools."""
        return (*tools, self.result, self.answer)


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat dialect: messages and tool calls in the model family's own format.

    The whole text of a turn without calls is the final answer.

    stop: strings that end a turn, too, and stay part of it: `Chat(stop=("</search>",))` for an environment
    that reads tags in the text.

    Raises:
        ValueError: `stop` is no sequence of texts, or one is empty.
    """

    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(map(_is_text, stop)):
            raise ValueError(f'stop is a tuple of texts, such as ("</search>",), got {stop!r}')
        object.__setattr__(self, "stop", tuple(stop))

    def names(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Every name that must be unique: those of the tools."""
        return tuple(tools)


Dialect: TypeAlias = Tags | Chat
"""The text format of turns."""


def tags_of(dialect: Dialect) -> Tags:
    """The tags to parse turns with where they are plain text."""
    return dialect if isinstance(dialect, Tags) else Tags()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def opening(tag: str) -> str:
    """`<tag>`."""
    return f"<{tag}>"


def closing(tag: str) -> str:
    """`</tag>`."""
    return f"</{tag}>"
