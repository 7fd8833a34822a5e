"""An episode as text, with the author of each message; control characters are made visible."""

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
    """One message: its speaker (`world` or `model`), its role and its text.

    agent: the agent that wrote it or that it was shown to, in an episode of several agents; else "".
    """

    speaker: str
    role: str
    text: str
    agent: str = ""

    @property
    def label(self) -> str:
        """The writer's name: the agent's where there are several, else `world` or `model`."""
        return self.agent if self.agent and self.speaker == MODEL else self.speaker


class Move(NamedTuple):
    """One turn of an agent. is_trained: whether the trained policy took it."""

    agent: str
    turn: Turn
    is_trained: bool


def moves_of(episode: Episode) -> list[Move]:
    """All turns of all agents, in the order of their steps. agent: "" where there is only one."""
    several = len(episode.agents) > 1
    moves = [
        Move(trajectory.agent if several else "", turn, trajectory.trainable)
        for trajectory in episode.trajectories
        for turn in trajectory.turns
    ]
    return sorted(moves, key=lambda move: move.turn.step)


def transcript_entries(episode: Episode) -> Iterator[TranscriptEntry]:
    """All messages of an episode, in order."""
    for agent, turn, _ in moves_of(episode):
        for message in turn.observation:
            yield TranscriptEntry(WORLD, message.role, text_of(message), agent)
        yield TranscriptEntry(MODEL, turn.action.role, text_of(turn.action), agent)


def text_of(message: Message) -> str:
    """The text of a message: its reasoning, its content and its tool calls, where present."""
    parts = [message.reasoning or "", _content(message), *map(_call_text, message.tool_calls)]
    return "\n".join(part for part in parts if part)


def _content(message: Message) -> str:
    """The content of a message as text, with a placeholder for each image."""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        part.text if isinstance(part, Text) else f"[image: {part.media_type}]" for part in message.content
    )


def visible(text: str) -> str:
    """Text in which every character is visible: controls, surrogates and direction marks as ‹U+001B›.

    Line breaks and tabs stay. Text of a model can then neither control a terminal nor change the
    order in which text is displayed.
    """
    if text.isprintable():
        return text
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
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
    """One line: the task, the ending, the reward and the number of turns."""
    score = "not scored" if verdict is None else f"reward {verdict.total:g}"
    turns = len(episode.turns)
    return f"{episode.task.id} · {episode.ending} · {score} · {turns} turn{'s' if turns != 1 else ''}"
