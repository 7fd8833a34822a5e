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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count

from agentrl.engine.served.chat_replies import Body, ReplyTurn, arguments_of
from agentrl.engine.served.requests import RefusedError, check_supported
from agentrl.envs.gateway.openai_chat import (
    WireRequest,
    deltas_of,
    json_schema_format,
    logprobs_of,
    read_request,
    renamed,
    text_of,
    tools_of,
)
from agentrl.envs.gateway.recording import RESPONSE_FORMAT, Answered
from agentrl.types import JSON, Finish, ToolCall

_COPIED = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "store"),
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_IGNORED = ("client_metadata",)
_REASONING = "reasoning"
_LOGPROBS = "message.output_text.logprobs"
_NEUTRAL: Mapping[str, tuple[JSON, ...]] = {
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "background": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({},),
}
"""Fields that are accepted with these values, which change nothing."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_TEXT, _THOUGHT = "output_text", "reasoning_text"
_FUNCTION = {name: name for name in ("name", "description", "parameters", "strict")}
_OF_SERVERS = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation")
"""Types of tools that OpenAI's servers run."""
_IN_SPACE = "__"
"""Between a namespace and the name of a function in it: templates know no namespaces."""
_RESPONSE = "resp_"


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
    overruled: list[str] = []
    spaces: set[str] = set()
    if (tools := fields.pop("tools", None)) is not None:
        chat["tools"], overruled = tools_of(tools, _is_of_server, partial(_functions, spaces))
    include = fields.get("include")
    if isinstance(include, list) and _LOGPROBS in include:
        chat["logprobs"], fields["include"] = True, [name for name in include if name != _LOGPROBS]
    choice = fields.pop("tool_choice", None)
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    chat["tool_choice"] = {"function": choice} if is_named else choice
    chat[RESPONSE_FORMAT] = _response_format(fields)
    reasoning = fields.pop(_REASONING, None)
    check_supported(fields, _NEUTRAL, _IGNORED)
    request = read_request(chat)
    if reasoning and any(value is not None for value in _values(reasoning)):
        overruled.append(_REASONING)
    asked = request.asked.with_overruled((*request.asked.overruled, *overruled))
    return request._replace(asked=asked, namespaces=frozenset(spaces)), items


def _response_format(fields: Body) -> JSON:
    """The form of the reply as a chat request has it; taken out of `text`."""
    text = fields.get("text")
    if not isinstance(text, dict):
        return None
    form = text.get("format")
    fields["text"] = {name: value for name, value in text.items() if name != "format"}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return json_schema_format({name: value for name, value in form.items() if name != "type"})
    return form


def responses_reply(request: WireRequest, answers: Sequence[Answered], id: str) -> Body:
    """The reply in one piece. id: of the response; its items have ids with the same end."""
    (answered,) = answers
    usage, is_cut = answered.counted, answered.completion.finish is Finish.LENGTH
    return {
        **_opened(request, id),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(_output(answered, id, request.namespaces)),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def new_id() -> str:
    """The id of a response."""
    return f"{_RESPONSE}{uuid.uuid4().hex}"


class ResponsesEvents:
    """A reply as the events of a stream: an item for each kind of text, then one for each call.

    whole: the reply in one piece, with the same id.
    """

    def __init__(self, request: WireRequest, id: str, whole: Callable[[Sequence[Answered]], Body]) -> None:
        self._opening, self._id, self._whole = _opened(request, id), id, whole
        self._deltas, self._namespaces = deltas_of(request), request.namespaces
        self._number = count()
        self._index, self._kind, self._text = -1, "", ""
        self._logprobs: list[JSON] = []

    def more(self, turn: ReplyTurn, num_prompt_tokens: int) -> Iterator[str]:
        """The events of what the reply has more than before."""
        del num_prompt_tokens
        yield from self._begun()
        yield from self._texts(turn, ended=False)

    def end(self, answers: Sequence[Answered]) -> Iterator[str]:
        """The events of all that is left."""
        (answered,), reply = answers, self._whole(answers)
        # With logprobs, all of a text is sent at the end.
        self._logprobs = logprobs_of(answered, answered.content_tokens)
        yield from self._begun()
        yield from self._texts(answered.turn, ended=True)
        if self._index < 0 and not answered.turn.calls:
            yield from self._grown(_TEXT, "")
        yield from self._closed()
        for call in answered.turn.calls:
            yield from self._called(_call(call, self._namespaces))
        yield self._event(f"response.{reply['status']}", {"response": reply})

    def error(self, sentence: str, status: int, code: str | None) -> str:
        """The event of an error."""
        named = code or ("server_error" if status >= 500 else "invalid_request_error")
        return self._event("error", {"code": named, "message": sentence, "param": None})

    def _begun(self) -> Iterator[str]:
        if self._opening:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", {"response": self._opening})
            self._opening = {}

    def _texts(self, turn: ReplyTurn, *, ended: bool) -> Iterator[str]:
        for delta in self._deltas.next(turn, ended=ended):
            for field, kind in (("reasoning_content", _THOUGHT), ("content", _TEXT)):
                if field in delta:
                    yield from self._grown(kind, str(delta[field]))

    def _grown(self, kind: str, text: str) -> Iterator[str]:
        if kind != self._kind:
            yield from self._closed()
            self._index, self._kind, self._text = self._index + 1, kind, ""
            item: Body = {**_item(kind, "", self._id, []), "content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", {"output_index": self._index, "item": item})
            yield self._event("response.content_part.added", {**self._place, "part": _content(kind, "", [])})
        self._text += text
        yield self._event(
            f"response.{kind}.delta", {**self._place, "delta": text, **_more(kind, self._logprobs)}
        )

    def _closed(self) -> Iterator[str]:
        if self._kind:
            kind, text = self._kind, self._text
            yield self._event(
                f"response.{kind}.done", {**self._place, "text": text, **_more(kind, self._logprobs)}
            )
            part = _content(kind, text, self._logprobs)
            yield self._event("response.content_part.done", {**self._place, "part": part})
            item = _item(kind, text, self._id, self._logprobs)
            yield self._event("response.output_item.done", {"output_index": self._index, "item": item})
            self._kind = ""

    def _called(self, item: Body) -> Iterator[str]:
        self._index += 1
        at: Body = {"output_index": self._index}
        place: Body = {**at, "item_id": item["id"]}
        written = item["arguments"]
        opened: Body = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", {**at, "item": opened})
        yield self._event("response.function_call_arguments.delta", {**place, "delta": written})
        done: Body = {**place, "name": item["name"], "arguments": written}
        yield self._event("response.function_call_arguments.done", done)
        yield self._event("response.output_item.done", {**at, "item": item})

    @property
    def _place(self) -> Body:
        """Where the text that grows stands."""
        id = _item(self._kind, "", self._id, [])["id"]
        return {"output_index": self._index, "item_id": id, "content_index": 0}

    def _event(self, kind: str, fields: Body) -> str:
        event = {"type": kind, "sequence_number": next(self._number), **fields}
        return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def _opened(request: WireRequest, id: str) -> Body:
    """A response that has begun."""
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _output(answered: Answered, id: str, namespaces: Collection[str]) -> Iterator[Body]:
    turn = answered.turn
    if turn.reasoning:
        yield _item(_THOUGHT, turn.reasoning, id, [])
    if turn.content or not turn.calls:
        yield _item(_TEXT, turn.content, id, logprobs_of(answered, answered.content_tokens))
    for call in turn.calls:
        yield _call(call, namespaces)


def _item(kind: str, text: str, id: str, logprobs: list[JSON]) -> Body:
    """A text as an item. id: of the response. logprobs: of an answer's tokens."""
    own, content = id.removeprefix(_RESPONSE), [_content(kind, text, logprobs)]
    if kind == _THOUGHT:
        return {"type": "reasoning", "id": f"rs_{own}", "summary": [], "content": content}
    message: Body = {"type": "message", "id": f"msg_{own}", "role": "assistant", "content": content}
    return {**message, "status": "completed"}


def _content(kind: str, text: str, logprobs: list[JSON]) -> JSON:
    annotations: Body = {} if kind == _THOUGHT else {"annotations": []}
    return {"type": kind, "text": text, **annotations, **_more(kind, logprobs)}


def _more(kind: str, logprobs: list[JSON]) -> Body:
    return {} if kind == _THOUGHT else {"logprobs": logprobs}


def _call(call: ToolCall, namespaces: Collection[str]) -> Body:
    space, _, name = call.name.partition(_IN_SPACE)
    named: Body = {"name": name, "namespace": space} if space in namespaces else {"name": call.name}
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        **named,
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
        name, space = item.get("name"), item.get("namespace")
        name = f"{space}{_IN_SPACE}{name}" if isinstance(space, str) and space else name
        function: JSON = {"name": name, "arguments": item.get("arguments")}
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
    return text_of(content, _TEXTS, f"{where} holds a part that is no text; this endpoint takes text only.")


def _is_of_server(tool: Body) -> bool:
    return tool.get("type") in _OF_SERVERS


def _functions(spaces: set[str], tool: Body) -> Sequence[Body] | None:
    """spaces: receives the name of a namespace, whose functions are named with it."""
    kind, name, own = tool.get("type"), tool.get("name"), tool.get("tools")
    if kind == "namespace" and isinstance(name, str) and name and isinstance(own, list):
        spaces.add(name)
        functions = [renamed(each, _FUNCTION) for each in own if isinstance(each, dict)]
        return [{**each, "name": f"{name}{_IN_SPACE}{each.get('name')}"} for each in functions]
    return [renamed(tool, _FUNCTION)] if kind == "function" else None
