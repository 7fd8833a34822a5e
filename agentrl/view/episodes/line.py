"""A line of the journal without its types: its row of the index, its text, and the part that the page shows.

A run may hold 100,000 entries, and making an `Entry` of each takes several times as long as reading the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import NamedTuple, TypedDict

from agentrl.observe.lines import to_line
from agentrl.types import AGENT, JSON

_DIGITS = 4
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


class Row(NamedTuple):
    """What the page filters and sorts an episode by.

    group: what its siblings have in common, in one file. reward: the mean over the agents that the policy
    played; None = not scored. advantage: the mean over its tokens. tokens: sampled by the policy; length:
    those of the prompt and the world, too. calls, problems: of tools, and of these the malformed, refused,
    timed-out and failed ones. version: the highest policy version; None = nothing was sampled.
    """

    id: str
    task: str
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


def row_of(entry: EntryLine) -> Row:
    """The row of an entry."""
    episode = entry["episode"]
    id, task, tools = episode["id"], episode["task"]["id"], episode.get("tools", {})
    turns = [turn for part in episode["trajectories"] for turn in part["turns"]]
    sampled = [tokens["completion"] for part in episode["trajectories"] for tokens in _tokens(part)]
    num_world = sum(len(t["world_ids"]) for part in episode["trajectories"] for t in _tokens(part))
    trained = [
        tokens["completion"]
        for part in episode["trajectories"]
        if part.get("trainable", True)
        for tokens in _tokens(part)
    ]
    training = _TRAINING_ID.match(id)
    return Row(
        id=id,
        task=task,
        group=task if training is None else training[1],
        env=episode["env_id"],
        ending=_ending(episode),
        outcome=f"{entry['outcome']}: {entry['reason']}" if entry.get("reason") else entry["outcome"],
        tools=tuple(sorted(name for name, stats in tools.items() if stats.get("calls"))),
        reward=_reward(entry),
        advantage=_mean([_mean(values) for values in entry.get("advantages", {}).values() if values]),
        turns=len(turns),
        tokens=sum(len(completion["token_ids"]) for completion in trained),
        length=num_world + sum(len(completion["token_ids"]) for completion in sampled),
        calls=episode.get("counts", {}).get("tool_calls", sum(s.get("calls", 0) for s in tools.values())),
        problems=sum(map(_num_problems, tools.values())) + episode.get("counts", {}).get("unknown_tools", 0),
        version=max((max(c["versions"]) for c in trained if c["versions"]), default=None),
        seconds=round(episode.get("seconds", 0.0), 3),
    )


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
    messages = [
        message
        for part in episode["trajectories"]
        for turn in part["turns"]
        for message in (*turn["observation"], turn["action"])
    ]
    failure = episode.get("failure") or {}
    parts = [episode["id"], episode["env_id"], task["id"], task.get("answer"), *failure.values()]
    # An episode that failed before its first turn has its prompt in the task alone.
    for message in messages or task["prompt"]:
        parts += _texts(message)
    return "\n".join(part for part in parts if part)


def shown_line(entry: EntryLine) -> bytes:
    """The entry as the page reads it: the journal's own JSON without extras, logprobs with four decimals.

    It changes the entry.
    """
    for part in entry["episode"]["trajectories"]:
        for tokens in _tokens(part):
            completion = tokens["completion"]
            completion.pop("extras", None)
            completion["logprobs"] = [round(logprob, _DIGITS) for logprob in completion["logprobs"]]
    return to_line(entry)[:-1]


def _tokens(part: TrajectoryLine) -> Iterator[TokensLine]:
    return (tokens for turn in part["turns"] if (tokens := turn.get("tokens")) is not None)


def _texts(message: MessageLine) -> Iterator[str | None]:
    content = message.get("content", "")
    yield message.get("reasoning")
    yield content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    for call in message.get("tool_calls", ()):
        yield call["name"]
        yield call.get("raw") or "\n".join(map(str, (call.get("arguments") or {}).values()))
        yield call.get("error")


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
    return fmean(numbers) if numbers else None


def _num_problems(stats: StatsLine) -> int:
    refused = (*stats.get("rejected", {}).values(), *stats.get("failed", {}).values())
    return stats.get("malformed", 0) + stats.get("timeouts", 0) + sum(refused)
