"""A line of the journal without its types: its row of the index, its text, and the part that the page shows.

A run may hold 100,000 entries, and making an `Entry` of each takes several times as long as reading the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from math import fsum
from typing import NamedTuple, TypedDict, cast

import numpy as np
from pydantic_core import from_json, to_json

from agentrl.records.lines import from_line, has_marks, to_line
from agentrl.types import AGENT, JSON

_DIGITS = 4
_SCALE = 10.0**_DIGITS
_MOST_SCALED = 1e9
_SURE = 0.5 - 1e-6
"""Nearer numbers are not the other one because of the product's error, which is below 1e-6 up to 1e9."""
_WORD, _OPENING = b"logprobs", b'":['
_SHOWN, _WORD_LEN = 120, 40
"""Of a prompt in a list, and of what can be chosen in a filter (characters)."""
_MAX_FACTS = 16
_TRAINING_ID = re.compile(r"(g\d+)-")


class CallLine(TypedDict, total=False):
    """A `ToolCall`."""

    name: str
    arguments: Mapping[str, JSON] | None
    raw: str
    error: str | None


class MessageLine(TypedDict, total=False):
    """A `Message`. Its parts are {"text": ...} and {"url": ...}."""

    content: str | list[dict[str, str]]
    reasoning: str | None
    tool_calls: list[CallLine]


class CompletionLine(TypedDict, total=False):
    """A `Completion`."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    extras: JSON


class TokensLine(TypedDict):
    """The `TurnTokens` of a turn."""

    world_ids: list[int]
    completion: CompletionLine


class TurnLine(TypedDict, total=False):
    """A `Turn`."""

    observation: list[MessageLine]
    action: MessageLine
    tokens: TokensLine | None


class TrajectoryLine(TypedDict, total=False):
    """A `Trajectory`."""

    turns: list[TurnLine]
    trainable: bool


class TaskLine(TypedDict, total=False):
    """A `Task`."""

    id: str
    prompt: list[MessageLine]
    answer: str | None
    metadata: Mapping[str, JSON]


class StatsLine(TypedDict, total=False):
    """A `ToolStats`."""

    calls: int
    malformed: int
    timeouts: int
    rejected: Mapping[str, int]
    failed: Mapping[str, int]


class EpisodeLine(TypedDict, total=False):
    """An `Episode`."""

    id: str
    env_id: str
    task: TaskLine
    trajectories: list[TrajectoryLine]
    ending: str
    failure: Mapping[str, str] | None
    counts: Mapping[str, int]
    tools: Mapping[str, StatsLine]
    frozen_agents: list[str]
    seconds: float


class VerdictLine(TypedDict, total=False):
    """A `Verdict`."""

    agent: str
    total: float


class EntryLine(TypedDict, total=False):
    """An `Entry`; fields at their defaults are left out."""

    episode: EpisodeLine
    verdicts: list[VerdictLine]
    outcome: str
    reason: str
    advantages: Mapping[str, list[float]]


class EpisodeRow(NamedTuple):
    """What the page filters and sorts an episode by.

    group: what its siblings have in common, in one file. reward: the mean over the agents that the policy
    played; None = not scored. advantage: the mean over its tokens. tokens: sampled by the policy; length:
    those of the prompt and the world, too. calls, problems: of tools, and of these the malformed, refused,
    timed-out and failed ones. version: the highest policy version; None = nothing was sampled.
    prompt: the beginning of the task's last message. facts: what is short in its metadata.
    """

    id: str
    task: str
    prompt: str
    facts: Mapping[str, str]
    group: str
    env: str
    ending: str
    outcome: str
    tools: tuple[str, ...]
    reward: float | None
    advantage: float | None
    turns: int
    tokens: int
    length: int
    calls: int
    problems: int
    version: int | None
    seconds: float


class JournalLine(NamedTuple):
    """A line and its entry. is_strict: a browser reads all of it as well; see `to_line`."""

    text: bytes
    entry: EntryLine
    is_strict: bool


def read_line(text: bytes) -> JournalLine:
    """Parse a line.

    Raises:
        ValueError: as for `from_line`.
    """
    if not has_marks(text):
        with suppress(ValueError):
            entry: EntryLine = from_json(text, cache_strings="keys", allow_inf_nan=False)
            return JournalLine(text, entry, is_strict=True)
    return JournalLine(text, cast(EntryLine, from_line(text)), is_strict=False)


def row_of(entry: EntryLine) -> EpisodeRow:
    """The row of an entry."""
    episode = entry["episode"]
    id, task, tools = episode["id"], episode["task"]["id"], episode.get("tools", {})
    training = _TRAINING_ID.match(id)
    num_tokens, length, version = _counts(episode)
    return EpisodeRow(
        id=id,
        task=task,
        prompt=_beginning(episode["task"].get("prompt", [])),
        facts=_facts(episode["task"].get("metadata", {})),
        group=task if training is None else training[1],
        env=episode["env_id"],
        ending=_ending(episode),
        outcome=f"{entry['outcome']}: {entry['reason']}" if entry.get("reason") else entry["outcome"],
        tools=tuple(sorted(name for name, stats in tools.items() if stats.get("calls"))),
        reward=_reward(entry),
        advantage=_mean([_mean(values) for values in entry.get("advantages", {}).values() if values]),
        turns=sum(len(part["turns"]) for part in episode["trajectories"]),
        tokens=num_tokens,
        length=length,
        calls=episode.get("counts", {}).get("tool_calls", sum(s.get("calls", 0) for s in tools.values())),
        problems=sum(map(_num_problems, tools.values())) + episode.get("counts", {}).get("unknown_tools", 0),
        version=version,
        seconds=round(episode.get("seconds", 0.0), 3),
    )


def _beginning(prompt: Sequence[MessageLine]) -> str:
    """The first words of the last message, in one line."""
    parts: list[str | None] = []
    for message in prompt[-1:]:
        _add_texts(message, parts)
    # Only the beginning is split: a prompt may be long.
    words = " ".join("\n".join(filter(None, parts))[: 4 * _SHOWN].split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"


def _facts(metadata: Mapping[str, JSON]) -> dict[str, str]:
    """The words, numbers and truth values of a task's metadata."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in islice(metadata.items(), _MAX_FACTS)
        if isinstance(value, str | int | float | bool)
    }
    return {key: text for key, text in texts.items() if len(key) <= _WORD_LEN and 0 < len(text) <= _WORD_LEN}


def _counts(episode: EpisodeLine) -> tuple[int, int, int | None]:
    """`tokens`, `length` and `version` of a row."""
    num_tokens, length, versions = 0, 0, list[int]()
    for part in episode["trajectories"]:
        is_trained = part.get("trainable", True)
        for tokens in _tokens(part):
            completion = tokens["completion"]
            num_sampled = len(completion["token_ids"])
            length += len(tokens["world_ids"]) + num_sampled
            if is_trained:
                num_tokens += num_sampled
                versions += completion["versions"]
    return num_tokens, length, max(versions, default=None)


def ids_of(entry: EntryLine) -> Iterator[list[int]]:
    """All token ids, in lists."""
    for part in entry["episode"]["trajectories"]:
        for tokens in _tokens(part):
            yield tokens["world_ids"]
            yield tokens["completion"]["token_ids"]


def text_of(entry: EntryLine) -> str:
    """All that a search looks in: ids, the answer, every message, calls with their errors, the failure."""
    episode = entry["episode"]
    task = episode["task"]
    failure = episode.get("failure") or {}
    parts = [episode["id"], episode["env_id"], task["id"], task.get("answer"), *failure.values()]
    turns = [turn for part in episode["trajectories"] for turn in part["turns"]]
    for turn in turns:
        for message in turn["observation"]:
            _add_texts(message, parts)
        _add_texts(turn["action"], parts)
    # An episode that failed before its first turn has its prompt in the task alone.
    for message in () if turns else task["prompt"]:
        _add_texts(message, parts)
    return "\n".join(filter(None, parts))


def shown_lines(lines: Sequence[JournalLine]) -> list[bytes]:
    """Lines as the page reads them: the journal's own JSON without extras, logprobs with four decimals.

    The entries may be changed.
    """
    completions = [
        [tokens["completion"] for part in line.entry["episode"]["trajectories"] for tokens in _tokens(part)]
        for line in lines
    ]
    logprobs = [completion["logprobs"] for completion in chain.from_iterable(completions)]
    values = iter(_rounded([*chain.from_iterable(logprobs)]))
    rounded = [[*islice(values, len(part))] for part in logprobs]
    # All numbers in one call: a call for each completion takes longer than its numbers.
    texts = iter(to_json(rounded, inf_nan_mode="constants")[2:-2].split(b"],["))
    shown = []
    for line, parts in zip(lines, completions, strict=True):
        own = [*islice(texts, len(parts))]
        shown.append(_with_logprobs(line, own, parts) or _written(line.entry, own, parts))
    return shown


def _with_logprobs(
    line: JournalLine, texts: Sequence[bytes], completions: Sequence[CompletionLine]
) -> bytes | None:
    """The line with other logprobs, where they can be found in it; without them, None.

    Writing all other numbers of the line again would take most of the time.
    """
    parts = line.text.split(_WORD)
    # No text, name or argument has the word, and no completion has it in another form.
    if len(parts) != len(texts) + 1 or not line.is_strict:
        return None
    if any("extras" in completion for completion in completions):
        return None
    for index, text in enumerate(texts, start=1):
        after = parts[index]
        if not (after.startswith(_OPENING) and parts[index - 1].endswith(b'"')):
            return None
        parts[index] = _OPENING + text + after[after.index(b"]") :]
    return _WORD.join(parts)


def _written(entry: EntryLine, texts: Sequence[bytes], completions: Sequence[CompletionLine]) -> bytes:
    for completion, text in zip(completions, texts, strict=True):
        completion.pop("extras", None)
        completion["logprobs"] = [float(number) for number in text.split(b",") if number]
    return to_line(entry)[:-1]


def _rounded(values: Sequence[float]) -> list[float]:
    """`round(value, 4)` of each, which takes a microsecond a value."""
    with np.errstate(all="ignore"):
        scaled = np.fromiter(values, float, len(values)) * _SCALE
        nearest = np.rint(scaled)
        is_sure = (np.abs(scaled - nearest) < _SURE) & (np.abs(scaled) < _MOST_SCALED)
    rounded: list[float] = (nearest / _SCALE).tolist()
    for index in np.flatnonzero(~is_sure).tolist():
        rounded[index] = round(values[index], _DIGITS)
    return rounded


def _tokens(part: TrajectoryLine) -> list[TokensLine]:
    return [tokens for turn in part["turns"] if (tokens := turn.get("tokens")) is not None]


def _add_texts(message: MessageLine, parts: list[str | None]) -> None:
    content = message.get("content", "")
    parts.append(message.get("reasoning"))
    parts.append(content if isinstance(content, str) else "".join(part.get("text", "") for part in content))
    for call in message.get("tool_calls", ()):
        parts.append(call["name"])
        parts.append(call.get("raw") or "\n".join(map(str, (call.get("arguments") or {}).values())))
        parts.append(call.get("error"))


def _ending(episode: EpisodeLine) -> str:
    failure = episode.get("failure")
    return episode["ending"] if failure is None else f"failed: {failure['stage']}_{failure['kind']}"


def _reward(entry: EntryLine) -> float | None:
    frozen = entry["episode"].get("frozen_agents", ())
    verdicts = entry["verdicts"]
    played = [verdict["total"] for verdict in verdicts if verdict.get("agent", AGENT) not in frozen]
    return _mean(played)


def _mean(values: list[float] | list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fsum(numbers) / len(numbers) if numbers else None


def _num_problems(stats: StatsLine) -> int:
    refused = (*stats.get("rejected", {}).values(), *stats.get("failed", {}).values())
    return stats.get("malformed", 0) + stats.get("timeouts", 0) + sum(refused)
