"""Episodes as the logs of inspect_ai (`.eval`), which `inspect view` and its Python API open.

A log is one file of the journal: a training step, or an evaluation. It is a zip of JSON:

    header.json                       status, environment, model, the mean of each score
    samples/TASK_epoch_K.json         an episode: messages, calls, scores, tokens; siblings are epochs
    summaries.json                    the list of them
    _journal/start.json               the header as it was at the beginning

Messages are those of all agents in the order of their steps, as in `agentrl view`: after a restart, its
prompt stands again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile

from agentrl.records import Entry
from agentrl.types import JSON, Ending, Episode, Finish, Message, Part, Text, ToolCall, Usage
from agentrl.view.formats.provenance import Provenance, producer, readable_line
from agentrl.view.transcript import moves_of, visible

SUFFIX: Final = ".eval"
_VERSION: Final = 2
_SHORT: Final = 1024
"""Characters of a text in a summary."""


class InspectLog:
    """Writes one log. path: of a new file, which is complete once the block has ended."""

    def __init__(self, path: Path, place: Provenance) -> None:
        self._zip = ZipFile(path, "x", ZIP_DEFLATED)
        self._place = place
        self._epochs: Counter[str] = Counter()
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._summaries: list[JSON] = []
        self._usage = Usage()
        self._env = ""

    def __enter__(self) -> InspectLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._zip:
            if kind is None:
                self._finish()

    def add(self, entry: Entry) -> None:
        """Add an episode."""
        episode = entry.episode
        self._env = self._env or episode.env_id
        id = _sample_id(episode)
        self._epochs[id] += 1
        epoch = self._epochs[id]
        sample = _sample(entry, epoch, self._place.model)
        scores = _scores(entry)
        for name, score in scores.items():
            self._scores[name].append(score)
        self._usage += _usage(episode)
        self._summaries.append(_summary(sample))
        self._write(f"samples/{id}_epoch_{epoch}.json", sample)

    def _write(self, name: str, value: JSON) -> None:
        self._zip.writestr(name, readable_line(value))

    def _finish(self) -> None:
        spec = self._spec()
        plan: JSON = {"name": "agentrl", "steps": [{"solver": "agentrl"}]}
        start: JSON = {"version": _VERSION, "eval": spec, "plan": plan}
        self._write("_journal/start.json", start)
        self._write("summaries.json", self._summaries)
        stats = {"started_at": "", "completed_at": self._time()}
        usage: JSON = {self._place.model: _usage_json(self._usage)}
        header: JSON = {
            "version": _VERSION,
            "status": "success",
            "eval": spec,
            "plan": plan,
            "results": self._results(),
            "stats": {**stats, "model_usage": usage},
        }
        self._write("header.json", header)

    def _time(self) -> str:
        return datetime.fromtimestamp(self._place.written_s, UTC).isoformat(timespec="seconds")

    def _spec(self) -> JSON:
        place = self._place
        name = f"{self._env or 'agentrl'} {place.key}"
        tasks: list[JSON] = [*self._epochs]
        return {
            "eval_id": f"{place.run}/{place.key}",
            "run_id": place.run,
            "created": self._time(),
            "task": name,
            "task_id": f"{self._env}/{place.key}",
            "dataset": {"name": self._env, "samples": len(tasks), "sample_ids": tasks},
            "model": place.model,
            "config": {"epochs": max(self._epochs.values(), default=1)},
            "packages": {"agentrl": producer()["version"]},
            "metadata": {"run": place.run, "file": place.key},
        }

    def _results(self) -> JSON:
        number = len(self._summaries)
        scores: list[JSON] = [
            {
                "name": name,
                "scorer": name,
                "scored_samples": len(values),
                "unscored_samples": number - len(values),
                "metrics": {"mean": {"name": "mean", "value": fmean(values)}},
            }
            for name, values in self._scores.items()
        ]
        return {"total_samples": number, "completed_samples": number, "scores": scores}


def _sample_id(episode: Episode) -> str:
    """The name of the task, which is part of the name of a file in the zip."""
    return visible(episode.task.id).replace("..", "\N{TWO DOT LEADER}")


def _sample(entry: Entry, epoch: int, model: str) -> dict[str, JSON]:
    episode = entry.episode
    messages: list[JSON] = []
    for agent, turn, is_trained in moves_of(episode):
        writer = model if is_trained else agent
        messages += [_message(message, agent, None) for message in turn.observation]
        messages.append(_message(turn.action, agent, writer))
    metadata: dict[str, JSON] = {
        "episode": episode.id,
        "seed": episode.seed,
        "split": episode.task.split,
        "outcome": entry.outcome,
        "reason": entry.reason,
        "ending": str(episode.ending),
        "counts": dict(episode.events),
        "versions": [entry.start_version, entry.end_version],
        "task": dict(episode.task.metadata),
    }
    sample: dict[str, JSON] = {
        "id": _sample_id(episode),
        "epoch": epoch,
        "input": [_message(message, "", None) for message in episode.task.prompt],
        "target": episode.task.answer or "",
        "messages": messages,
        "output": _output(episode, model),
        "scores": {name: {"value": score} for name, score in _scores(entry).items()},
        "metadata": metadata,
        "model_usage": {model: _usage_json(_usage(episode))},
        "total_time": episode.seconds,
        "uuid": episode.id,
        "turn_count": len(episode.turns),
    }
    if episode.failure is not None:
        text = f"{episode.failure.name}: {episode.failure.detail}"
        sample["error"] = {"message": text, "traceback": "", "traceback_ansi": ""}
    elif episode.ending is Ending.TRUNCATED:
        is_turns = any(len(episode.turns_of(agent)) >= episode.limits.max_turns for agent in episode.agents)
        sample["limit"] = {"type": "turn" if is_turns else "custom", "limit": episode.limits.max_turns}
    return sample


def _summary(sample: dict[str, JSON]) -> JSON:
    """What a list of samples shows of one."""
    kept = ("id", "epoch", "target", "scores", "model_usage", "total_time", "uuid", "turn_count")
    messages, error, limit = sample["messages"], sample.get("error"), sample.get("limit")
    metadata = sample["metadata"]
    assert isinstance(messages, list), "as `_sample` has made them"
    assert isinstance(metadata, dict), "as `_sample` has made it"
    short: JSON = {name: value for name, value in metadata.items() if not isinstance(value, dict)}
    return {
        **{name: sample[name] for name in kept},
        "input": _shortened(sample["input"]),
        "metadata": short,
        "message_count": len(messages),
        "error": error["message"] if isinstance(error, dict) else None,
        "limit": limit["type"] if isinstance(limit, dict) else None,
        "completed": True,
    }


def _shortened(messages: JSON) -> JSON:
    assert isinstance(messages, list), "a prompt is a list"
    texts = [m["content"] for m in messages if isinstance(m, dict) and isinstance(m["content"], str)]
    return "\n".join(text for text in texts if isinstance(text, str))[:_SHORT]


def _message(message: Message, agent: str, writer: str | None) -> dict[str, JSON]:
    """A message. writer: the model that wrote it now; None = it was heard."""
    row: dict[str, JSON] = {"role": message.role, "content": _content(message)}
    if message.role == "assistant":
        row |= {"source": "generate", "model": writer} if writer is not None else {"source": "input"}
        if message.tool_calls:
            row["tool_calls"] = [_call(call, place) for place, call in enumerate(message.tool_calls)]
    if message.role == "tool":
        row |= {"tool_call_id": message.tool_call_id, "function": message.name}
    return {**row, "metadata": {"agent": agent}} if agent else row


def _content(message: Message) -> JSON:
    if message.reasoning is None and isinstance(message.content, str):
        return message.content
    parts: list[JSON] = []
    if message.reasoning is not None:
        parts.append({"type": "reasoning", "reasoning": message.reasoning})
    content = (Text(message.content),) if isinstance(message.content, str) else message.content
    return parts + [_part(part) for part in content]


def _part(part: Part) -> JSON:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image", "image": part.url}


def _call(call: ToolCall, place: int) -> JSON:
    found: dict[str, JSON] = {
        "id": call.id or f"call_{place}",
        "function": call.name,
        "arguments": dict(call.arguments or {}),
        "type": "function",
    }
    return found if call.error is None else {**found, "parse_error": call.error}


def _output(episode: Episode, model: str) -> JSON:
    """The last thing that the trained policy, or else anybody, wrote."""
    moves = moves_of(episode)
    last = next((move for move in reversed(moves) if move.is_trained), moves[-1] if moves else None)
    if last is None:
        return {"model": model, "choices": []}
    tokens = last.turn.tokens
    is_cut = tokens is not None and tokens.completion.finish is Finish.LENGTH
    reason = "max_tokens" if is_cut else "tool_calls" if last.turn.action.tool_calls else "stop"
    choice: JSON = {"message": _message(last.turn.action, last.agent, model), "stop_reason": reason}
    return {"model": model, "choices": [choice], "usage": _usage_json(_usage(episode))}


def _usage(episode: Episode) -> Usage:
    """The tokens of all requests of the trained policy; of a chat endpoint, as it counted them."""
    if episode.usage is not None:
        return episode.usage
    total = Usage()
    for trajectory in (one for one in episode.trajectories if one.trainable):
        length = 0
        for tokens in (turn.tokens for turn in trajectory.turns if turn.tokens is not None):
            length += len(tokens.world_ids)
            sampled = len(tokens.completion.token_ids)
            total += Usage(length, sampled, tokens.completion.cached_tokens)
            length += sampled
    return total


def _usage_json(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens_cache_read": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "total_cost": usage.cost,
    }


def _scores(entry: Entry) -> dict[str, float]:
    """The reward of each agent, and its parts."""
    several = len(entry.episode.agents) > 1
    scores: dict[str, float] = {}
    for verdict in entry.verdicts:
        agent = f"{verdict.agent}/" if several else ""
        scores[f"{agent}reward"] = float(verdict.total)
        # A mean of others and a part that is no number is none.
        parts = {name: float(part) for name, part in verdict.parts.items() if math.isfinite(part)}
        scores |= {f"{agent}{name}": part for name, part in parts.items() if name != "reward"}
    return scores
