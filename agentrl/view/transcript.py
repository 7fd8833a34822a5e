"""An episode as words: who said what, safe to show to a person."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.types import Episode, Message, Text, ToolCall, Turn, Verdict

WORLD, MODEL = "world", "model"

# Directional marks can make a terminal or a page show text in another order than it has.
_DIRECTION_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """One message: who wrote it (`world` or `model`), its role and its text.

    agent: who wrote it or was shown it, in an episode of several agents; else an empty string.
    """

    speaker: str
    role: str
    text: str
    agent: str = ""

    @property
    def label(self) -> str:
        """The writer's name: that of the agent, of several; else `world` or `model`."""
        return self.agent if self.agent and self.speaker == MODEL else self.speaker


class Move(NamedTuple):
    """One turn of an agent. is_trained: whether the policy took it that is trained."""

    agent: str
    turn: Turn
    is_trained: bool


def moves_of(episode: Episode) -> list[Move]:
    """All turns of all agents, in the order of their steps. agent: an empty string where there is only
    one."""
    several = len(episode.agents) > 1
    moves = [
        Move(one.agent if several else "", turn, one.trainable)
        for one in episode.trajectories
        for turn in one.turns
    ]
    return sorted(moves, key=lambda move: move.turn.step)


def passages(episode: Episode) -> Iterator[TranscriptEntry]:
    """All messages of an episode, in order."""
    for agent, turn, _ in moves_of(episode):
        for message in turn.observation:
            yield TranscriptEntry(WORLD, message.role, words_of(message), agent)
        yield TranscriptEntry(MODEL, turn.action.role, words_of(turn.action), agent)


def words_of(message: Message) -> str:
    """The text of a message: its reasoning, its content and its tool calls, as far as it has them."""
    parts = [message.reasoning or "", _content(message), *map(_call_text, message.tool_calls)]
    return "\n".join(part for part in parts if part)


def _content(message: Message) -> str:
    """The words of a message, with a place holder for each image."""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        part.text if isinstance(part, Text) else f"[image: {part.media_type}]" for part in message.content
    )


def visible(text: str) -> str:
    """Text in which every character shows: controls, surrogates and direction marks as ‹U+001B›.

    Line breaks and tabs stay. What a model writes can then neither drive a terminal nor
    pretend to be something else.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    if unicodedata.category(character) in {"Cc", "Cs"} or character in _DIRECTION_MARKS:
        return f"‹U+{ord(character):04X}›"
    return character


def _call_text(call: ToolCall) -> str:
    if call.raw:
        return call.raw
    if call.arguments is None:
        return f"{call.name}(?) {call.error}"
    return (
        f"{call.name}({', '.join(f'{name}={json.dumps(value)}' for name, value in call.arguments.items())})"
    )


def summary_of(episode: Episode, verdict: Verdict | None) -> str:
    """One line: who it is, how it ended, what it was worth."""
    worth = "not scored" if verdict is None else f"reward {verdict.total:g}"
    turns = len(episode.turns)
    return f"{episode.task.id} · {episode.ending} · {worth} · {turns} turn{'s' if turns != 1 else ''}"
