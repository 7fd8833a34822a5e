"""Dialects as data: the form that turns take between a model and a world.

Inline tags: the world writes into the assistant's own text, as in Search-R1 (arXiv:2503.09516) and
ReTool (arXiv:2504.11536). With `Tags(result="information")` and a tool `search` an episode reads

    <search>Kalor Mendos born</search><information>Kalor Mendos was born in Tirak</information>
    <answer>Tirak</answer>

Rendering turns this into tokens; environments never see tags, only Messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Tags:
    """The names of the tags around what the world answers and around the final answer.

    A tool's tag is the tool's name: one argument stands in it as plain text, several as JSON.

    Raises:
        ValueError: a name that cannot be a tag, or both names equal.
    """

    result: str = "result"
    answer: str = "answer"

    def __post_init__(self) -> None:
        for name in (self.result, self.answer):
            if not _NAME.fullmatch(name):
                raise ValueError(f"a tag's name is letters, digits and underscores, got {name!r}")
        if self.result == self.answer:
            raise ValueError(f"result and answer need two different tags, got {self.result!r} for both")

    def names(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Every tag of an environment with these tools."""
        return (*tools, self.result, self.answer)


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat dialect: messages and tool calls in the model family's own format.

    The whole text of a turn without calls is the final answer.
    """

    def names(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Every name that must be told apart: the tools'."""
        return tuple(tools)


Dialect: TypeAlias = Tags | Chat
"""The form that turns take."""


def tags_of(dialect: Dialect) -> Tags:
    """The tags by which turns are told where all that there is of them is text."""
    return dialect if isinstance(dialect, Tags) else Tags()


def opening(tag: str) -> str:
    """`<tag>`."""
    return f"<{tag}>"


def closing(tag: str) -> str:
    """`</tag>`."""
    return f"</{tag}>"
