"""POST /v1/messages of an episode, in Anthropic's protocol: requests as OpenAI's, replies in its own form.

{"model": "any", "max_tokens": 64, "system": "Be brief.",
 "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 12 * 30?"}]}],
 "tools": [{"name": "calculator", "input_schema": {"type": "object", "properties": {...}}}]}
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence

from agentrl.engine.served.chat_replies import Body
from agentrl.engine.served.requests import RefusedError
from agentrl.envs.gateway.openai_chat import WireRequest, read_request
from agentrl.envs.gateway.recording import Answered
from agentrl.types import JSON, Finish

_COPIED = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
_IGNORED = ("metadata", "service_tier")
_THINKING = "thinking"
_ROLES = ("user", "assistant")
_CHOICES: Mapping[JSON, JSON] = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def read_messages(fields: Body, *, counts_only: bool = False) -> WireRequest:
    """Parse the fields of a request.

    counts_only: its tokens are counted, and it says nothing of a reply.

    Raises:
        RefusedError: it is invalid, exceeds a bound, or asks for what no engine here does.
    """
    if counts_only:
        fields = {"max_tokens": 1, **fields}
    if not isinstance(fields.get("max_tokens"), int):
        raise RefusedError("`max_tokens` has to be a number: the most tokens of the reply.")
    chat: Body = {name: fields.pop(name) for name in _COPIED if name in fields}
    chat["stop"] = fields.pop("stop_sequences", None)
    chat["messages"] = [*_system(fields.pop("system", None)), *_messages(fields.pop("messages", None))]
    if (tools := fields.pop("tools", None)) is not None:
        chat["tools"] = _tools(tools)
    if (choice := fields.pop("tool_choice", None)) is not None:
        chat["tool_choice"] = _choice(choice)
    thinking = fields.pop(_THINKING, None)
    for name in _IGNORED:
        fields.pop(name, None)
    for name, value in fields.items():
        if value not in (None, [], {}):
            raise RefusedError(f"`{name[:40]}` is not supported here; leave it out.")
    request = read_request(chat)
    if thinking is None:
        return request
    overruled = (*request.asked.overruled, _THINKING)
    return request._replace(asked=request.asked.with_overruled(overruled))


def messages_reply(request: WireRequest, answers: Sequence[Answered]) -> Body:
    """The reply in one piece."""
    (answered,) = answers
    return {
        **_head(request),
        "content": list(_blocks(answered)),
        "stop_reason": _stop_reason(answered),
        "stop_sequence": answered.stopped_by,
        "usage": _usage(answered),
    }


def messages_events(request: WireRequest, answers: Sequence[Answered]) -> Iterator[str]:
    """The reply as the events of a stream."""
    (answered,) = answers
    opened: Body = {
        **_head(request),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_usage(answered), "output_tokens": 0},
    }
    yield _event("message_start", {"message": opened})
    for index, block in enumerate(_blocks(answered)):
        empty, delta = _opened(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    ending: Body = {"stop_reason": _stop_reason(answered), "stop_sequence": answered.stopped_by}
    yield _event("message_delta", {"delta": ending, "usage": _usage(answered)})
    yield _event("message_stop", {})


def messages_error(sentence: str, status: int) -> Body:
    """The reply to a refused or failed request."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}}


def _event(kind: str, fields: Body) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


def _head(request: WireRequest) -> Body:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }


def _blocks(answered: Answered) -> Iterator[Body]:
    """The content of a reply. One without a word has an empty text, since clients read the first block."""
    turn = answered.turn
    if turn.reasoning:
        yield {"type": "thinking", "thinking": turn.reasoning, "signature": ""}
    if turn.content or not turn.calls:
        yield {"type": "text", "text": turn.content}
    for call in turn.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments or {})}


def _opened(block: Body) -> tuple[Body, Body]:
    """A block as a stream begins it, and all of its content as one delta."""
    if block["type"] == "tool_use":
        written = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
    kind = str(block["type"])
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _stop_reason(answered: Answered) -> str:
    if answered.completion.finish is Finish.LENGTH:
        return "max_tokens"
    if answered.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if answered.turn.calls else "end_turn"


def _usage(answered: Answered) -> Body:
    completion = answered.completion
    return {
        "input_tokens": answered.num_prompt_tokens - completion.cached_tokens,
        "output_tokens": len(completion.token_ids),
        "cache_read_input_tokens": completion.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _system(system: JSON) -> Iterator[Body]:
    if system is not None:
        yield {"role": "system", "content": _text(system, "`system`")}


def _messages(messages: JSON) -> Iterator[Body]:
    if not isinstance(messages, list) or not messages:
        raise RefusedError("`messages` has to be a list of messages.")
    for number, message in enumerate(messages, start=1):
        where = f"Message {number} of `messages`"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise RefusedError(f"{where} has no role of `user` or `assistant`.")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise RefusedError(f"{where} has a `content` that is neither text nor a list of blocks.")
        known: list[Body] = [dict(block) for block in blocks if isinstance(block, dict)]
        if message["role"] == "user":
            yield from _of_user(known, where)
        else:
            yield _of_assistant(known, where)


def _of_user(blocks: Sequence[Body], where: str) -> Iterator[Body]:
    """Results of tools as messages of their own, and the texts between them."""
    texts: list[JSON] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": _text(texts, where)}
                texts = []
            content = _text(block.get("content") or "", where)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        else:
            texts.append(block)
    if texts or not blocks:
        yield {"role": "user", "content": _text(texts, where)}


def _of_assistant(blocks: Sequence[Body], where: str) -> Body:
    calls: list[JSON] = []
    texts: list[JSON] = []
    thoughts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "tool_use", "id": id, "name": name, "input": dict(arguments)}:
                function: JSON = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case _:
                texts.append(block)
    message: Body = {"role": "assistant", "content": _text(texts, where)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _text(content: JSON, where: str) -> str:
    """The text of a string, or of blocks of text."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise RefusedError(f"{where} holds a block that is not supported here; send text and tools.")
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: JSON) -> list[JSON]:
    if not isinstance(tools, list):
        raise RefusedError("`tools` is no list.")
    return [_tool(tool, number) for number, tool in enumerate(tools, start=1)]


def _tool(tool: JSON, number: int) -> JSON:
    fields = tool if isinstance(tool, dict) else {}
    if "name" in fields and "input_schema" in fields and fields.get("type") in (None, "custom"):
        function: Body = {"name": fields["name"], "parameters": fields["input_schema"]}
        if "description" in fields:
            function["description"] = fields["description"]
        return {"type": "function", "function": function}
    raise RefusedError(
        f"Tool {number} of `tools` has no name and `input_schema`; tools of a server are not here."
    )


def _choice(choice: JSON) -> JSON:
    if isinstance(choice, dict):
        if choice.get("disable_parallel_tool_use"):
            raise RefusedError(
                "`disable_parallel_tool_use` is not held here: the model decides; leave it out."
            )
        if choice.get("type") == "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        kind = choice.get("type")
        if isinstance(kind, str) and kind in _CHOICES:
            return _CHOICES[kind]
    raise RefusedError('`tool_choice` has no `type` of "auto", "any", "tool" or "none".')
