"""POST /v1/messages of an episode, in Anthropic's protocol: requests as OpenAI's, replies in its own form.

{"model": "any", "max_tokens": 64, "system": "Be brief.",
 "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 12 * 30?"}]}],
 "tools": [{"name": "calculator", "input_schema": {"type": "object", "properties": {...}}}]}
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence

from agentrl.engine.served.chat_replies import Body, ReplyTurn
from agentrl.engine.served.requests import RefusedError, check_supported
from agentrl.envs.gateway.openai_chat import (
    WireRequest,
    deltas_of,
    json_schema_format,
    read_request,
    renamed,
    text_of,
    tools_of,
)
from agentrl.envs.gateway.recording import RESPONSE_FORMAT, Answered
from agentrl.types import JSON, Finish, ToolCall

_COPIED = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
_IGNORED = ("metadata", "service_tier")
_THINKING = "thinking"
_FUNCTION = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
_OUTPUT, _EFFORT, _FORMAT = "output_config", "effort", "format"
_ROLES = ("user", "assistant", "system")
_NEUTRAL: Mapping[str, Sequence[JSON]] = {
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},),
}
"""Fields that are accepted with this value, which changes nothing."""
_OF_SERVERS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_")
"""How the types of tools begin that Anthropic's servers run."""
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
    overruled: list[str] = []
    if (tools := fields.pop("tools", None)) is not None:
        chat["tools"], overruled = tools_of(tools, _is_of_server, _functions)
    if (choice := fields.pop("tool_choice", None)) is not None:
        chat["tool_choice"] = _choice(choice)
    overruled += [_THINKING] if fields.pop(_THINKING, None) is not None else []
    output = fields.get(_OUTPUT)
    if isinstance(output, dict) and set(output) <= {_EFFORT, _FORMAT}:
        overruled += [_EFFORT] if _EFFORT in output else []
        chat[RESPONSE_FORMAT] = _response_format(output.get(_FORMAT))
        del fields[_OUTPUT]
    given = {name: value for name, value in fields.items() if value not in ([], {})}
    check_supported(given, _NEUTRAL, _IGNORED)
    request = read_request(chat)
    asked = request.asked
    return request._replace(asked=asked.with_overruled((*asked.overruled, *overruled)))


def _response_format(form: JSON) -> JSON:
    """The form of a reply as a chat request has it, where a schema has a name."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return json_schema_format({"name": "output", "schema": form.get("schema")})


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


class MessagesEvents:
    """A reply as the events of a stream: a block for each kind of text, then one for each call."""

    def __init__(self, request: WireRequest) -> None:
        self._head, self._deltas = _head(request), deltas_of(request)
        self._index, self._kind = -1, ""

    def more(self, turn: ReplyTurn, num_prompt_tokens: int) -> Iterator[str]:
        """The events of what the reply has more than before."""
        yield from self._begun(_usage_of(num_prompt_tokens, 0, 0))
        yield from self._texts(turn, ended=False)

    def end(self, answers: Sequence[Answered]) -> Iterator[str]:
        """The events of all that is left."""
        (answered,) = answers
        yield from self._begun({**_usage(answered), "output_tokens": 0})
        yield from self._texts(answered.turn, ended=True)
        if self._index < 0 and not answered.turn.calls:
            yield from self._text("text", "")
        for block in map(_call, answered.turn.calls):
            written = json.dumps(block["input"], ensure_ascii=False)
            yield from self._opened({**block, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield from self._closed()
        ending: Body = {"stop_reason": _stop_reason(answered), "stop_sequence": answered.stopped_by}
        yield _event("message_delta", {"delta": ending, "usage": _usage(answered)})
        yield _event("message_stop", {})

    def error(self, sentence: str, status: int, code: str | None) -> str:
        """The event of an error."""
        del code
        return _event("error", messages_error(sentence, status))

    def _begun(self, usage: Body) -> Iterator[str]:
        if self._head:
            opened: Body = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _event("message_start", {"message": {**self._head, **opened}})
            self._head = {}

    def _texts(self, turn: ReplyTurn, *, ended: bool) -> Iterator[str]:
        for delta in self._deltas.next(turn, ended=ended):
            for field, kind in (("reasoning_content", _THINKING), ("content", "text")):
                if field in delta:
                    yield from self._text(kind, str(delta[field]))

    def _text(self, kind: str, text: str) -> Iterator[str]:
        if kind != self._kind:
            signature: Body = {"signature": ""} if kind == _THINKING else {}
            yield from self._opened({"type": kind, kind: "", **signature})
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _opened(self, block: Body) -> Iterator[str]:
        yield from self._closed()
        self._index, self._kind = self._index + 1, str(block["type"])
        yield _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: Body) -> str:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _closed(self) -> Iterator[str]:
        if self._kind:
            yield _event("content_block_stop", {"index": self._index})
            self._kind = ""


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
    yield from map(_call, turn.calls)


def _call(call: ToolCall) -> Body:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments or {})}


def _stop_reason(answered: Answered) -> str:
    if answered.completion.finish is Finish.LENGTH:
        return "max_tokens"
    if answered.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if answered.turn.calls else "end_turn"


def _usage(answered: Answered) -> Body:
    usage = answered.counted
    return _usage_of(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _usage_of(num_prompt_tokens: int, num_cached: int, num_sampled: int) -> Body:
    return {
        "input_tokens": max(num_prompt_tokens - num_cached, 0),
        "output_tokens": num_sampled,
        "cache_read_input_tokens": num_cached,
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
            raise RefusedError(f"{where} has no role of `user`, `assistant` or `system`.")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise RefusedError(f"{where} has a `content` that is neither text nor a list of blocks.")
        known: list[Body] = [dict(block) for block in blocks if isinstance(block, dict)]
        if message["role"] == "system":
            yield {"role": "system", "content": _text(content, where)}
        elif message["role"] == "user":
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
    return text_of(
        content, ("text",), f"{where} holds a block that is not supported here; send text and tools."
    )


def _is_of_server(tool: Body) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_OF_SERVERS)


def _functions(tool: Body) -> Sequence[Body] | None:
    is_own = "name" in tool and "input_schema" in tool and tool.get("type") in (None, "custom")
    return [renamed(tool, _FUNCTION)] if is_own else None


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
