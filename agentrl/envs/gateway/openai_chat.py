"""POST /v1/chat/completions of an episode, in OpenAI's protocol; the other protocols are translated into it.

Fields are those of `agentrl serve`. What a request says of sampling is overruled by the run's settings, since
every token is trained as the policy has sampled it, and counted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import NamedTuple, Protocol

from agentrl.engine.served.chat_replies import (
    Body,
    Deltas,
    ReplyHead,
    ReplyTurn,
    choice,
    chunk_part,
    event_of,
    finish_of,
    token_logprob,
    usage_body,
)
from agentrl.engine.served.chat_wire import read_chat
from agentrl.engine.served.replies import openai_error
from agentrl.engine.served.requests import RefusedError
from agentrl.envs.gateway.recording import RESPONSE_FORMAT, Answered, ModelRequest
from agentrl.tools.json_text import read_json
from agentrl.types import JSON, Message, ToolCall

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "reasoning_effort", "verbosity"),
)
_STRICT = "strict"
_SERVER_TOOLS = "server_tools"
_NO_CALL = (
    "The model has not called the tool that `tool_choice` asks for, and no other, and nothing here makes it; "
    'write "auto", and answer a reply without a call.'
)


class WireRequest(NamedTuple):
    """A request and how its reply is sent. namespaces: of tools, see `openai_responses`."""

    asked: ModelRequest
    model: str
    stream: bool
    include_usage: bool
    namespaces: frozenset[str] = frozenset()

    @property
    def grows(self) -> bool:
        """Whether its stream may begin while the reply is sampled: nothing else depends on its end."""
        return self.stream and self.asked.n == 1 and self.asked.must_call is None and not self.asked.logprobs


def fields_of(body: bytes) -> Body:
    """The fields of a body.

    Raises:
        RefusedError: it is no JSON object.
    """
    try:
        fields = read_json(body.decode())
    except ValueError as error:
        raise RefusedError(f"The body is no JSON: {str(error)[:100]}.") from None
    if not isinstance(fields, dict):
        raise RefusedError("The body is no JSON object.")
    return fields


def read_request(fields: Body) -> WireRequest:
    """Parse the fields of a request.

    Raises:
        RefusedError: it is invalid, exceeds a bound, or asks for what no engine here does.
    """
    overruled = tuple(name for name in _SAMPLING if fields.pop(name, None) is not None)
    tools = fields.get("tools")
    if isinstance(tools, list):
        fields["tools"] = [_without_strict(tool) for tool in tools]
        overruled += (_STRICT,) if fields["tools"] != tools else ()
    must_call = _must_call(fields)
    response_format = _response_format(fields.pop(RESPONSE_FORMAT, None))
    chat = read_chat(fields)
    names = [tool.name for tool in chat.tools]
    if must_call is not None and (not names or (must_call and must_call not in names)):
        raise RefusedError("`tool_choice` asks for a tool that `tools` lacks.")
    messages, num_split = _merged(_placed(chat.messages))
    if messages[-1].role == "assistant":
        raise RefusedError("The last message is the assistant's, and no reply goes on from it; leave it out.")
    asked = ModelRequest(
        messages,
        chat.tools,
        must_call,
        chat.n,
        chat.max_tokens,
        chat.stop,
        logprobs=chat.logprobs,
        overruled=overruled,
        num_split=num_split,
        response_format=response_format,
    )
    return WireRequest(asked, str(fields["model"]), chat.stream, chat.include_usage)


def check_calls(asked: ModelRequest, answers: Sequence[Answered]) -> None:
    """Check that replies call what their request says.

    Raises:
        RefusedError: one does not: the model decides, and no engine here makes it.
    """
    if asked.must_call is None:
        return
    for answered in answers:
        names = {call.name for call in answered.turn.calls}
        if not names or (asked.must_call and names != {asked.must_call}):
            raise RefusedError(_NO_CALL, "tool_choice_not_held")


def whole_reply(request: WireRequest, answers: Sequence[Answered]) -> Body:
    """The reply in one piece."""
    choices = [
        choice(index, answered.turn, answered.completion, _logprobs(request, answered))
        for index, answered in enumerate(answers)
    ]
    return {**_head(request).body("chat.completion", choices), "usage": _usage(answers)}


class ReplyEvents(Protocol):
    """A reply as the events of a stream, in some protocol."""

    def more(self, turn: ReplyTurn, num_prompt_tokens: int) -> Iterator[str]:
        """The events of what a single reply has more than before, while it is sampled."""

    def end(self, answers: Sequence[Answered]) -> Iterator[str]:
        """The events of all that is left."""

    def error(self, sentence: str, status: int, code: str | None) -> str:
        """The event of an error, which ends the stream."""


class ChatEvents:
    """A reply of any number of choices as the events of a stream."""

    def __init__(self, request: WireRequest) -> None:
        self._request, self._head = request, _head(request)
        self._deltas: dict[int, Deltas] = {}

    def more(self, turn: ReplyTurn, num_prompt_tokens: int) -> Iterator[str]:
        """The events of what a single reply has more than before."""
        del num_prompt_tokens
        yield from self._parts(0, turn, None, ended=False)

    def end(self, answers: Sequence[Answered]) -> Iterator[str]:
        """The events of all that is left."""
        for index, answered in enumerate(answers):
            yield from self._parts(index, answered.turn, _logprobs(self._request, answered), ended=True)
            finish = finish_of(answered.turn, answered.completion)
            yield self._chunk([chunk_part(index, {}, None, finish)])
        if self._request.include_usage:
            yield self._chunk([], _usage(answers))
        yield "data: [DONE]\n\n"

    def error(self, sentence: str, status: int, code: str | None) -> str:
        """The event of an error."""
        return event_of(openai_error(sentence, status, code))

    def _parts(self, index: int, turn: ReplyTurn, logprobs: JSON, *, ended: bool) -> Iterator[str]:
        if index not in self._deltas:
            self._deltas[index] = deltas_of(self._request)
            yield self._chunk([chunk_part(index, {"role": "assistant", "content": ""}, None)])
        parts = list(self._deltas[index].next(turn, ended=ended))
        if logprobs is not None and not parts:
            parts = [{}]
        for number, part in enumerate(parts):
            yield self._chunk([chunk_part(index, part, None if number else logprobs)])

    def _chunk(self, choices: Sequence[JSON], usage: JSON = None) -> str:
        body = self._head.body("chat.completion.chunk", choices)
        return event_of({**body, "usage": usage} if self._request.include_usage else body)


def deltas_of(request: WireRequest) -> Deltas:
    """The parts of its reply, as far as they are certain."""
    return Deltas(bool(request.asked.tools), request.asked.stop)


def _head(request: WireRequest) -> ReplyHead:
    return ReplyHead(f"chatcmpl-{uuid.uuid4().hex}", request.model, int(time.time()))


def _logprobs(request: WireRequest, answered: Answered) -> JSON:
    if not request.asked.logprobs:
        return None
    return {"content": logprobs_of(answered), "refusal": None}


def logprobs_of(answered: Answered, tokens: slice = slice(None)) -> list[JSON]:
    """The logprobs of some of its tokens; none, where the request has not asked for them."""
    if not answered.texts:
        return []
    pairs = zip(answered.texts[tokens], answered.completion.logprobs.tolist()[tokens], strict=True)
    return [token_logprob(text, logprob) for text, logprob in pairs]


def _usage(answers: Sequence[Answered]) -> Body:
    each = [answered.counted for answered in answers]
    num_sampled = sum(usage.completion_tokens for usage in each)
    usage = usage_body(each[0].prompt_tokens, num_sampled, max(usage.cached_tokens for usage in each))
    num_reasoning = sum(usage.reasoning_tokens for usage in each)
    return {**usage, "completion_tokens_details": {"reasoning_tokens": num_reasoning}}


def _must_call(fields: Body) -> str | None:
    """The tool that has to be called, "" for any, None for none; `tool_choice` then is a supported one."""
    choice = fields.get("tool_choice")
    if choice == "required":
        fields["tool_choice"] = "auto"
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        return None
    fields["tool_choice"] = "auto"
    return name


def json_schema_format(schema: Body) -> Body:
    """The response format of a schema, with its name, as chat requests write it."""
    return {"type": "json_schema", "json_schema": schema}


def _response_format(given: JSON) -> JSON:
    """The form of a reply; None for text."""
    form = given if isinstance(given, dict) else {}
    kind, described = form.get("type"), form.get("json_schema")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind == "json_schema" and isinstance(described, dict):
        name, schema = described.get("name"), described.get("schema")
        if isinstance(name, str) and name and isinstance(schema, dict):
            return json_schema_format(described)
    raise RefusedError(
        '`response_format` is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"name": "...", "schema": {...}}}.'
    )


def _without_strict(tool: JSON) -> JSON:
    """A tool that is not `strict`: clients set it by default, and check the arguments all the same."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or not function.get(_STRICT):
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if name != _STRICT}}


def text_of(content: JSON, kinds: Collection[str], refusal: str) -> str:
    """The text of a string, or of parts of these kinds.

    Raises:
        RefusedError: with this sentence, a part is of another kind.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        if not isinstance(text, str):
            raise RefusedError(refusal)
        texts.append(text)
    return "\n".join(texts)


def tools_of(
    tools: JSON, is_of_server: Callable[[Body], bool], functions_of: Callable[[Body], Sequence[Body] | None]
) -> tuple[list[JSON], list[str]]:
    """The tools of another protocol, and what is overruled: those that its vendor's server would run.

    functions_of: any other tool as functions of this one; None = it is no tool.

    Raises:
        RefusedError: one is none, or they are no list.
    """
    if not isinstance(tools, list):
        raise RefusedError("`tools` is no list.")
    offered: list[JSON] = []
    overruled: list[str] = []
    for number, tool in enumerate(tools, start=1):
        if isinstance(tool, dict) and is_of_server(tool):
            overruled = [_SERVER_TOOLS]
            continue
        functions = functions_of(tool) if isinstance(tool, dict) else None
        if functions is None:
            raise RefusedError(
                f"Tool {number} of `tools` is no function with a name and a schema; no other kind is here."
            )
        offered += [{"type": "function", "function": function} for function in functions]
    return offered, overruled


def renamed(tool: Body, names: Mapping[str, str]) -> Body:
    """Some fields of a tool under other names: own name -> name in the tool."""
    return {own: tool[name] for own, name in names.items() if name in tool}


def _placed(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages with one of the system, the first. Later ones become the user's: few templates have a place
    for them, and those of the user beside them are one with them."""
    leading = list(takewhile(lambda message: message.role == "system", messages))
    placed = [reduce(_with_text, leading)] if leading else []
    is_mixed = False
    for message in messages[len(leading) :]:
        is_late = message.role == "system"
        own = Message("user", message.text) if is_late else message
        is_user = own.role == "user" and bool(placed) and placed[-1].role == "user"
        if is_user and (is_late or is_mixed):
            placed[-1] = _with_text(placed[-1], own)
        else:
            placed.append(own)
        is_mixed = own.role == "user" and (is_late or (is_mixed and is_user))
    return placed


def _with_text(first: Message, second: Message) -> Message:
    return Message(first.role, "\n\n".join(filter(None, (first.text, second.text))))


def _merged(messages: Sequence[Message]) -> tuple[tuple[Message, ...], int]:
    """Messages of which no two of the assistant follow each other, and how many were parts of one."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == "assistant" == merged[-1].role:
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return tuple(merged), len(messages) - len(merged)


def _joined(first: Message, second: Message) -> Message:
    calls: tuple[ToolCall, ...] = (*first.tool_calls, *second.tool_calls)
    texts = filter(None, (first.text, second.text))
    thoughts = filter(None, (first.reasoning, second.reasoning))
    return Message("assistant", "\n".join(texts), "\n".join(thoughts) or None, calls)
