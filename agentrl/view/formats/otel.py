"""Episodes as OpenTelemetry's GenAI spans, in the JSON of OTLP: a line of traces for each episode.

    invoke_workflow ENV                 of an episode of several agents only
      invoke_agent AGENT                an agent's part of it, with its rewards as evaluation events
        chat MODEL                      a turn: messages, tokens, finish reason
        execute_tool TOOL               a call, with its arguments and its result

A collector reads the lines (`otlpjsonfilereceiver`), and so do the services that take OTLP. Names are those
of the semantic conventions; they need no SDK, for what was recorded is not traced now. A journal has
durations and no time of day: an episode ends when its file was written, and its turns fill its seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from agentrl.records import Entry
from agentrl.types import JSON, Episode, Finish, Message, Part, Text, ToolCall, Turn
from agentrl.view.formats.provenance import Provenance, producer, totals
from agentrl.view.transcript import text_of

Attribute: TypeAlias = str | int | float | Sequence[str]
_INTERNAL, _CLIENT, _ERROR = 1, 3, 2
_NS: Final = 1_000_000_000


class _Turned(NamedTuple):
    """A turn, what its agent had heard and said before, the tokens of that, and the results of its calls."""

    turn: Turn
    heard: tuple[Message, ...]
    num_tokens: int
    results: Mapping[str, Message]


class _Span(NamedTuple):
    """A span's identity and time. begin, end: nanoseconds since 1970."""

    trace: str
    id: str
    parent: str
    begin: int
    end: int


def traces_of(entry: Entry, place: Provenance) -> dict[str, JSON]:
    """The traces of an episode."""
    episode = entry.episode
    trace = _id(f"{place.run}/{place.key}/{episode.id}", 16)
    end = int(place.written_s * _NS)
    root = _Span(trace, _id(f"{trace}/root", 8), "", end - int(episode.seconds * _NS), end)
    spans: list[JSON] = []
    several = len(episode.agents) > 1
    if several:
        workflow = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": episode.env_id}
        spans.append(_span(root, f"invoke_workflow {episode.env_id}", workflow, error=_failure(episode)))
    for agent in episode.agents:
        own = root._replace(id=_id(f"{trace}/{agent}", 8), parent=root.id) if several else root
        spans += _agent_spans(entry, place, own, agent)
    facts = producer()
    scope: JSON = {"scope": {**facts}, "spans": spans}
    resource = {"service.name": "agentrl", "service.version": str(facts["version"])}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def _agent_spans(entry: Entry, place: Provenance, own: _Span, agent: str) -> Iterator[JSON]:
    episode = entry.episode
    facts: dict[str, Attribute] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "agentrl",
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": episode.id,
        "gen_ai.request.model": place.model,
        "agentrl.environment": episode.env_id,
        "agentrl.task": episode.task.id,
        "agentrl.file": place.key,
        "agentrl.ending": str(episode.ending),
        "agentrl.outcome": str(entry.outcome),
    }
    if episode.failure is not None:
        facts["error.type"] = episode.failure.name
    turned = [*_turned(episode, agent)]
    sampled = [tokens for one in turned if (tokens := one.turn.tokens) is not None]
    if sampled:
        facts["gen_ai.usage.input_tokens"] = sum(one.num_tokens for one in turned)
        facts["gen_ai.usage.output_tokens"] = sum(len(tokens.completion.token_ids) for tokens in sampled)
    reward = totals(entry.verdicts).get(agent)
    event = None if reward is None else _evaluation(entry, own, reward, agent)
    yield _span(own, f"invoke_agent {agent}", facts, error=_failure(episode), event=event)
    size = (own.end - own.begin) // max(len(turned), 1)
    for number, one in enumerate(turned):
        begin = own.begin + number * size
        span = _Span(own.trace, _id(f"{own.id}/{number}", 8), own.id, begin, begin + size)
        yield _chat(span, one, place)
        for place_of_call, call in enumerate(one.turn.action.tool_calls):
            id = _id(f"{span.id}/{place_of_call}", 8)
            yield _tool(_Span(own.trace, id, own.id, span.end, span.end), call, one.results)


def _failure(episode: Episode) -> str | None:
    return None if episode.failure is None else f"{episode.failure.name}: {episode.failure.detail}"


def _turned(episode: Episode, agent: str) -> Iterator[_Turned]:
    for trajectory in (one for one in episode.trajectories if one.agent == agent):
        heard: list[Message] = []
        num_tokens = 0
        following = [*(turn.observation for turn in trajectory.turns[1:]), ()]
        for turn, after in zip(trajectory.turns, following, strict=True):
            heard += turn.observation
            num_tokens += 0 if turn.tokens is None else len(turn.tokens.world_ids)
            results = {m.tool_call_id: m for m in after if m.role == "tool" and m.tool_call_id}
            yield _Turned(turn, tuple(heard), num_tokens, results)
            heard.append(turn.action)
            num_tokens += 0 if turn.tokens is None else len(turn.tokens.completion.token_ids)


def _chat(span: _Span, one: _Turned, place: Provenance) -> JSON:
    tokens, action = one.turn.tokens, one.turn.action
    facts: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentrl",
        "gen_ai.request.model": place.model,
        "gen_ai.input.messages": _json([_message(message) for message in one.heard]),
    }
    reason = "tool_calls" if action.tool_calls else "stop"
    if tokens is not None:
        completion = tokens.completion
        reason = "length" if completion.finish is Finish.LENGTH else reason
        facts |= {
            "gen_ai.request.temperature": float(completion.temperature),
            "gen_ai.usage.input_tokens": one.num_tokens,
            "gen_ai.usage.output_tokens": len(completion.token_ids),
            "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
        }
    facts["gen_ai.response.finish_reasons"] = [reason]
    facts["gen_ai.output.messages"] = _json([{**_message(action), "finish_reason": reason}])
    return _span(span, f"chat {place.model}", facts, kind=_CLIENT)


def _tool(span: _Span, call: ToolCall, results: Mapping[str, Message]) -> JSON:
    facts: dict[str, Attribute] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.arguments": call.raw if call.arguments is None else _json(dict(call.arguments)),
    }
    if call.id:
        facts["gen_ai.tool.call.id"] = call.id
    if (result := results.get(call.id)) is not None:
        facts["gen_ai.tool.call.result"] = text_of(result)
    if call.error is not None:
        facts["error.type"] = "malformed_call"
    return _span(span, f"execute_tool {call.name}", facts, error=call.error)


def _evaluation(entry: Entry, span: _Span, reward: float, agent: str) -> JSON:
    verdict = next(verdict for verdict in entry.verdicts if verdict.agent == agent)
    facts: dict[str, Attribute] = {
        "gen_ai.evaluation.name": verdict.scorer,
        "gen_ai.evaluation.score.value": float(reward),
        "gen_ai.evaluation.explanation": _json({name: float(part) for name, part in verdict.parts.items()}),
    }
    return {
        "name": "gen_ai.evaluation.result",
        "timeUnixNano": str(span.end),
        "attributes": _attributes(facts),
    }


def _message(message: Message) -> dict[str, JSON]:
    """A message in the schema of `gen_ai.input.messages`."""
    if message.role == "tool":
        response: JSON = {
            "type": "tool_call_response",
            "id": message.tool_call_id,
            "response": text_of(message),
        }
        return {"role": "tool", "parts": [response]}
    parts: list[JSON] = []
    if message.reasoning is not None:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if isinstance(message.content, str):
        parts += [{"type": "text", "content": message.content}] if message.content else []
    else:
        parts += [_part(part) for part in message.content]
    for call in message.tool_calls:
        arguments: JSON = None if call.arguments is None else dict(call.arguments)
        parts.append({"type": "tool_call", "id": call.id or None, "name": call.name, "arguments": arguments})
    return {"role": message.role, "parts": parts}


def _part(part: Part) -> JSON:
    if isinstance(part, Text):
        return {"type": "text", "content": part.text}
    data = part.url.partition(",")[2]
    return {"type": "blob", "modality": "image", "mime_type": part.media_type, "content": data}


def _span(
    span: _Span,
    name: str,
    facts: Mapping[str, Attribute],
    *,
    kind: int = _INTERNAL,
    error: str | None = None,
    event: JSON = None,
) -> JSON:
    found: dict[str, JSON] = {
        "traceId": span.trace,
        "spanId": span.id,
        "parentSpanId": span.parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(span.begin),
        "endTimeUnixNano": str(span.end),
        "attributes": _attributes(facts),
    }
    if error is not None:
        found["status"] = {"code": _ERROR, "message": error}
    return found if event is None else {**found, "events": [event]}


def _attributes(facts: Mapping[str, Attribute]) -> list[JSON]:
    return [{"key": name, "value": _value(value)} for name, value in facts.items()]


def _value(value: Attribute) -> JSON:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [{"stringValue": one} for one in value]}}


def _json(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False)


def _id(name: str, size: int) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
