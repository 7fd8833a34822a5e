"""Episodes as conversations for supervised fine-tuning: rows of messages in the form of OpenAI's API.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "", "tool_calls":
      [{"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{\"query\": \"P\"}"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "..."}], "reward": 1.0, "episode": "g3-0", ...}

One row for each unbroken prefix of each trained agent. Messages of the assistant that a prefix repeats have
`weight` 0, so each is trained on once. Episodes that SFT would leave out have no rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from agentrl.data.conversations import check_roles
from agentrl.data.messages import messages_of
from agentrl.errors import RecordError
from agentrl.records import Entry, Outcome
from agentrl.records.journal import entry_of
from agentrl.types import JSON, Ending, Image, Message, Part, Task, ToolCall, Trajectory, Verdict
from agentrl.view.formats.provenance import Provenance, totals

MALFORMED = "with a call that could not be parsed"
ORDER = "with roles in an order that no conversation has"


def rows_of(entry: Entry, place: Provenance) -> Iterator[dict[str, JSON] | str]:
    """The rows of an episode; in place of one, why it is left out."""
    episode = entry.episode
    if episode.ending is not Ending.COMPLETED:
        yield str(episode.ending)
        return
    rewards = totals(entry.verdicts)
    for number, trajectory in enumerate(episode.trajectories):
        if not trajectory.trainable:
            continue
        if reason := _unfit(trajectory):
            yield reason
            continue
        messages: list[JSON] = [*messages_in(trajectory)]
        yield {
            "messages": messages,
            "reward": rewards.get(trajectory.agent),
            "env": episode.env_id,
            "task": episode.task.id,
            "split": episode.task.split,
            "episode": episode.id,
            "trajectory": number,
            "agent": trajectory.agent,
            "outcome": entry.outcome,
            "file": place.key,
        }


def imported_of(row: dict[str, JSON], id: str, where: str) -> Entry:
    """The entry of a conversation, which has no tokens: it is scored where the row has a `reward`.

    Raises:
        RecordError: it is no conversation.
    """
    items, reward, task = row.get("messages"), row.get("reward"), row.get("task")
    if not isinstance(items, list):
        raise RecordError(f"{where}: `messages` is no list of messages")
    try:
        turns, prompt = _turns(items)
        verdicts = [] if reward is None else [Verdict(id, "imported", _number(reward))]
        name = task if isinstance(task, str) else id
        episode = {
            "id": id,
            "env_id": str(row.get("env") or "unknown"),
            "task": Task(name, prompt),
            "seed": 0,
            "limits": {},
            "trajectories": [{"turns": turns}],
            "step_rewards": [None] * len(turns),
            "ending": Ending.COMPLETED,
        }
    except (ValueError, ArithmeticError) as error:
        raise RecordError(f"{where}: `messages` {error}") from None
    return entry_of({"episode": episode, "verdicts": verdicts, "outcome": Outcome.EVALUATED}, where)


def _unfit(trajectory: Trajectory) -> str:
    """Why a conversation of these messages cannot be imitated; empty if it can."""
    said = tuple(m for turn in trajectory.turns for m in (*turn.observation, turn.action))
    if any(call.arguments is None for message in said for call in message.tool_calls):
        return MALFORMED
    try:
        check_roles(said)
    except ValueError:
        return ORDER
    return ""


def messages_in(trajectory: Trajectory) -> Iterator[dict[str, JSON]]:
    """All messages of a trajectory, each once."""
    for turn in trajectory.turns:
        for message in turn.observation:
            is_repeated = message.role == "assistant"
            yield {**chat_message(message), "weight": 0} if is_repeated else chat_message(message)
        yield chat_message(turn.action)


def chat_message(message: Message) -> dict[str, JSON]:
    """A message in the form of OpenAI's API. A malformed call has no arguments there."""
    content: JSON = message.content if isinstance(message.content, str) else [*map(_part, message.content)]
    row: dict[str, JSON] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [*map(_call, message.tool_calls)]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return {**row, **{name: value for name, value in optional.items() if value is not None}}


def _part(part: Part) -> JSON:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": part.text}


def _call(call: ToolCall) -> JSON:
    arguments = json.dumps(call.arguments or {}, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _turns(items: list[JSON]) -> tuple[list[dict[str, object]], tuple[Message, ...]]:
    """The turns of a conversation, and the messages before the first. Of weight 0: no turn, but heard."""
    turns: list[dict[str, object]] = []
    waiting: list[Message] = []
    prompt: tuple[Message, ...] | None = None
    for item, message in zip(items, messages_of(items), strict=True):
        is_heard = isinstance(item, dict) and item.get("weight") == 0
        if message.role != "assistant" or is_heard:
            waiting.append(message)
            continue
        prompt = tuple(waiting) if prompt is None else prompt
        place = {"step": len(turns), "tokens": None}
        turns.append({"observation": tuple(waiting), "action": message, **place})
        waiting = []
    return turns, tuple(waiting) if prompt is None else prompt


def _number(value: JSON) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"has the reward {str(value)[:40]!r}, which is no number")
    return float(value)
