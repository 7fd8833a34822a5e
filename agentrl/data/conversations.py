"""Conversations of files, to be imitated: rows of messages in the form of OpenAI's API, with their tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agentrl.data.columns import column_value
from agentrl.data.files import SlicedPath
from agentrl.data.messages import messages_of, schema_of, tools_of
from agentrl.data.rows import Rows, Sliced, open_rows
from agentrl.data.rows.base import Row
from agentrl.errors import DataError
from agentrl.types import JSON, Message, Observation, Role
from agentrl.types.seams import ToolSchema

DEFAULT_TOOLS = "tools"
_SWITCHES = ("weight", "step_loss_mask")
"""Keys of a message of the assistant: at 0 the loss leaves it out."""


class DialogueTurn(NamedTuple):
    """The messages before an action of the assistant, and the action. is_trained: whether it is imitated."""

    observation: Observation
    action: Message
    is_trained: bool


class Dialogue(NamedTuple):
    """A conversation of a file.

    turns: at least one of which is trained; messages after the last action are left out. tools: of the row;
    None = it has none of its own. where: the row, for error messages.
    """

    turns: tuple[DialogueTurn, ...]
    tools: tuple[ToolSchema, ...] | None
    where: str


class Dialogues:
    """The conversations of a file or a folder, in its order.

    path: of a file or a folder, or `path@[start:stop]`. messages_key, tools_key: names of columns; without
    the latter, `tools` where a row has it.

    Raises:
        DataError: the file cannot be read, or holds no rows.
    """

    def __init__(self, path: str, *, messages_key: str, tools_key: str | None) -> None:
        self._messages_key, self._tools_key = messages_key, tools_key
        file, start, stop = SlicedPath.of(path)
        self._rows = Sliced(self._open(file), start, stop)
        if not len(self._rows):
            raise DataError(f"{path} holds no conversations; check the file and the slice.")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Dialogue]:
        """Every conversation.

        Raises:
            DataError: a row is no conversation; the message begins with its location.
        """
        return (self._dialogue(self._rows.row(n), self._rows.where(n)) for n in range(len(self._rows)))

    def _open(self, file: str) -> Rows:
        names = (self._messages_key, self._tools_key or DEFAULT_TOOLS)
        try:
            return open_rows(file, names, split="train")
        except DataError:
            if self._tools_key is not None:
                raise
            # A table without that column; any other problem is raised again.
            return open_rows(file, names[:1], split="train")

    def _dialogue(self, row: Row, where: str) -> Dialogue:
        name = self._messages_key
        value = column_value(row, name, where, "messages_key")
        try:
            items = _list_of(value)
            turns = _turns(messages_of(items), items)
        except ValueError as error:
            raise DataError(f"{where}: `{name}` {error}.") from None
        return Dialogue(turns, self._tools(row, where), where)

    def _tools(self, row: Row, where: str) -> tuple[ToolSchema, ...] | None:
        name = self._tools_key or DEFAULT_TOOLS
        value = row.get(name) if self._tools_key is None else column_value(row, name, where, "tools_key")
        if value is None:
            return None
        try:
            return tuple(schema_of(tool) for tool in tools_of(value))
        except ValueError as error:
            raise DataError(f"{where}: `{name}` {error}.") from None


def _list_of(value: JSON) -> list[JSON]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list):
        raise ValueError("is no list of messages")
    return value


def _turns(messages: Observation, items: Sequence[JSON]) -> tuple[DialogueTurn, ...]:
    check_roles(messages)
    turns: list[DialogueTurn] = []
    begin = 0
    for end, (message, item) in enumerate(zip(messages, items, strict=True)):
        if message.role == "assistant":
            turns.append(DialogueTurn(messages[begin:end], message, _is_trained(item, end + 1)))
            begin = end + 1
    if not turns:
        raise ValueError("has no message of the assistant, so there is nothing to imitate")
    if not any(turn.is_trained for turn in turns):
        raise ValueError("has no message of the assistant that is trained: each has weight 0")
    return tuple(turns)


def check_roles(messages: Observation) -> None:
    """Check that every message may follow the one before.

    Raises:
        ValueError: it may not; the text has its number.
    """
    previous: Role | None = None
    has_calls = False
    for number, message in enumerate(messages, start=1):
        role = message.role
        if role == "assistant" and previous in (None, "assistant"):
            after = "begins the conversation" if previous is None else "follows another of the assistant"
            raise ValueError(f"has roles out of order: message {number}, of the assistant, {after}")
        if role == "tool" and not has_calls:
            raise ValueError(f"has roles out of order: message {number} is of a tool that was not called")
        if role == "system" and previous is not None:
            raise ValueError(f"has roles out of order: message {number}, of the system, is not the first")
        has_calls = bool(message.tool_calls) or (has_calls and role == "tool")
        previous = role


def _is_trained(item: JSON, number: int) -> bool:
    switches = [item[key] for key in _SWITCHES if key in item] if isinstance(item, dict) else []
    if wrong := [switch for switch in switches if switch not in (0, 1, None)]:
        raise ValueError(f"has a message {number} with a weight of {wrong[0]!r}; it is 0 or 1")
    return all(switch != 0 for switch in switches)
