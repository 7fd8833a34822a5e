"""POST /v1/responses of an episode, in OpenAI's protocol: its items as messages, and replies as items.

{"model": "any", "instructions": "Be brief.", "input": [
   {"role": "user", "content": "What is 12 * 30?"},
   {"type": "function_call", "call_id": "c1", "name": "calculator", "arguments": "{...}"},
   {"type": "function_call_output", "call_id": "c1", "output": "360"}],
 "tools": [{"type": "function", "name": "calculator", "parameters": {...}}]}
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

from agentrl.engine.served.chat_replies import Body, arguments_of
from agentrl.engine.served.requests import RefusedError
from agentrl.envs.gateway.openai_chat import WireRequest, read_request
from agentrl.envs.gateway.recording import Answered
from agentrl.types import JSON, Finish, ToolCall

_COPIED = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "store"),
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_REASONING = "reasoning"
_NEUTRAL: Mapping[str, tuple[JSON, ...]] = {
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "background": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
}
"""Fields that are accepted with these values, which change nothing."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")


def read_responses(fields: Body, earlier: Mapping[str, Sequence[JSON]]) -> tuple[WireRequest, Sequence[JSON]]:
    """Parse the fields of a request; its items follow, those of earlier responses included.

    earlier: the items up to each response of the episode, by its id.

    Raises:
        RefusedError: it is invalid, exceeds a bound, or asks for what no engine here does.
    """
    chat: Body = {name: fields.pop(name) for name in _COPIED if name in fields}
    items = _items(fields.pop("input", None))
    if (previous := fields.pop("previous_response_id", None)) is not None:
        if not isinstance(previous, str) or previous not in earlier:
            raise RefusedError("`previous_response_id` names no response of this episode.")
        items = [*earlier[previous], *items]
    instructions = fields.pop("instructions", None)
    system: list[JSON] = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *_messages(items)]
    chat["max_tokens"] = fields.pop("max_output_tokens", None)
    if (tools := fields.pop("tools", None)) is not None:
        chat["tools"] = _tools(tools)
    choice = fields.pop("tool_choice", None)
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    chat["tool_choice"] = {"function": choice} if is_named else choice
    reasoning = fields.pop(_REASONING, None)
    for name, value in fields.items():
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise RefusedError(f"`{name[:40]}` is not supported here with this value; leave it out.")
    request = read_request(chat)
    if reasoning and any(value is not None for value in _values(reasoning)):
        overruled = (*request.asked.overruled, _REASONING)
        request = request._replace(asked=request.asked.with_overruled(overruled))
    return request, items


def responses_reply(request: WireRequest, answers: Sequence[Answered]) -> Body:
    """The reply in one piece."""
    (answered,) = answers
    return _response(request, answered, f"resp_{uuid.uuid4().hex}", list(_output(answered)))


def responses_events(reply: Body) -> Iterator[str]:
    """A reply as the events of a stream."""
    opened: Body = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for number, (kind, fields) in enumerate(_stages(reply, opened)):
        event = {"type": kind, "sequence_number": number, **fields}
        yield f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def _stages(reply: Body, opened: Body) -> Iterator[tuple[str, Body]]:
    yield "response.created", {"response": opened}
    yield "response.in_progress", {"response": opened}
    output = reply["output"]
    for index, item in enumerate(output if isinstance(output, list) else ()):
        if isinstance(item, dict):
            yield from _item_stages(item, {"output_index": index, "item_id": item["id"]})
    yield f"response.{reply['status']}", {"response": reply}


def _item_stages(item: Body, place: Body) -> Iterator[tuple[str, Body]]:
    at: Body = {"output_index": place["output_index"]}
    kind = item["type"]
    if kind == "function_call":
        written = item["arguments"]
        opened: Body = {**item, "arguments": "", "status": "in_progress"}
        yield "response.output_item.added", {**at, "item": opened}
        yield "response.function_call_arguments.delta", {**place, "delta": written}
        done: Body = {**place, "name": item["name"], "arguments": written}
        yield "response.function_call_arguments.done", done
    else:
        yield "response.output_item.added", {**at, "item": {**item, "content": [], "status": "in_progress"}}
        yield from _part_stages(item, place)
    yield "response.output_item.done", {**at, "item": item}


def _part_stages(item: Body, place: Body) -> Iterator[tuple[str, Body]]:
    parts = item["content"]
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        if not isinstance(part, dict):
            continue
        here: Body = {**place, "content_index": index}
        name = "reasoning_text" if part["type"] == "reasoning_text" else "output_text"
        more: Body = {} if name == "reasoning_text" else {"logprobs": []}
        yield "response.content_part.added", {**here, "part": {**part, "text": ""}}
        yield f"response.{name}.delta", {**here, "delta": part["text"], **more}
        yield f"response.{name}.done", {**here, "text": part["text"], **more}
        yield "response.content_part.done", {**here, "part": part}


def _response(request: WireRequest, answered: Answered, id: str, output: list[JSON]) -> Body:
    completion = answered.completion
    is_cut = completion.finish is Finish.LENGTH
    num_prompt, num_sampled = answered.num_prompt_tokens, len(completion.token_ids)
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _output(answered: Answered) -> Iterator[Body]:
    turn = answered.turn
    id = uuid.uuid4().hex
    if turn.reasoning:
        thought: JSON = {"type": "reasoning_text", "text": turn.reasoning}
        yield {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": [thought]}
    if turn.content or not turn.calls:
        part: JSON = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        message: Body = {"type": "message", "id": f"msg_{id}", "role": "assistant", "content": [part]}
        yield {**message, "status": "completed"}
    yield from map(_call, turn.calls)


def _call(call: ToolCall) -> Body:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments_of(call),
        "status": "completed",
    }


def _values(reasoning: JSON) -> Sequence[JSON]:
    return list(reasoning.values()) if isinstance(reasoning, dict) else [reasoning]


def _items(given: JSON) -> list[JSON]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RefusedError("`input` has to be text or a list of items.")
    return given


def _messages(items: Sequence[JSON]) -> list[JSON]:
    """The items as messages: what the model wrote between two others is one of them."""
    messages: list[JSON] = []
    turn: Body | None = None
    for number, item in enumerate(items, start=1):
        where = f"Item {number} of `input`"
        if not isinstance(item, dict):
            raise RefusedError(f"{where} is no object.")
        part = _part_of_turn(item, where)
        if part is None:
            messages.append(_message(item, where))
            turn = None
        elif turn is None:
            turn = part
            messages.append(turn)
        else:
            _join(turn, part)
    return messages


def _part_of_turn(item: Body, where: str) -> Body | None:
    """An item that the model wrote as a message; None = another one wrote it."""
    kind = item.get("type", "message")
    if kind == "function_call":
        function: JSON = {"name": item.get("name"), "arguments": item.get("arguments")}
        call: JSON = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _thought(item)}
    if kind == "message" and item.get("role") == "assistant":
        return {"role": "assistant", "content": _text(item.get("content"), where)}
    return None


def _join(turn: Body, part: Body) -> None:
    """Add what the model wrote next in the same turn."""
    for name in ("content", "reasoning_content"):
        if part.get(name):
            turn[name] = "\n".join(filter(None, (str(turn.get(name) or ""), str(part[name]))))
    before, after = turn.get("tool_calls"), part.get("tool_calls")
    calls = [*(before if isinstance(before, list) else ()), *(after if isinstance(after, list) else ())]
    if calls:
        turn["tool_calls"] = calls


def _message(item: Body, where: str) -> JSON:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        output = _text(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "message" and item.get("role") in _ROLES:
        return {"role": item["role"], "content": _text(item.get("content"), where)}
    raise RefusedError(f"{where} is of a kind that is not supported here; send messages, calls and outputs.")


def _thought(item: Body) -> str:
    parts = [*_list(item.get("content")), *_list(item.get("summary"))]
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _list(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _text(content: JSON, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else None
        if not isinstance(text, str):
            raise RefusedError(f"{where} holds a part that is no text; this endpoint takes text only.")
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: JSON) -> list[JSON]:
    if not isinstance(tools, list):
        raise RefusedError("`tools` is no list.")
    offered: list[JSON] = []
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RefusedError(f"Tool {number} of `tools` is no function; tools of a server are not here.")
        names = ("name", "description", "parameters")
        offered.append({"type": "function", "function": {name: tool[name] for name in names if name in tool}})
    return offered
