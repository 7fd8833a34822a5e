"""Requests of /v1/chat/completions, in OpenAI's protocol: parsing, and validation with one-sentence errors.

    {"model": "any", "messages": [{"role": "user", "content": "What is 12 * 30?"}], "max_tokens": 64,
     "tools": [{"type": "function", "function": {"name": "calculator", "description": "Compute.",
                "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}]}

A field that would change the reply and is not supported is refused by its name.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field

from agentrl.data.messages import messages_of, schema_of, tools_of
from agentrl.engine.served.requests import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    RefusedError,
    check_supported,
    read,
)
from agentrl.tools.json_text import read_json, storable
from agentrl.types import JSON, Message, Observation, ToolCall
from agentrl.types.seams import ToolSchema

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CHOICES = 16
MAX_CALLS = 1000
"""Of a message."""
_MAX_CONTENT_PARTS = 4096

_Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Limit: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Fields of OpenAI's protocol that change nothing about a reply."""
_NEUTRAL: dict[str, tuple[JSON, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
}
"""Fields that this server does not support, and the values that disable them."""


class _StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    include_usage: bool | None = None


class _Chat(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[object], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[object], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: object = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of /v1/chat/completions.

    tools: that the model may call; none where `tool_choice` is "none". max_tokens: None = what the context
    holds. temperature, top_p, top_k, seed, stop: as in `Sampling`. n: choices of the reply (count).
    logprobs: the reply has them. stream: it is sent in parts. include_usage: the last of these has the usage.
    """

    messages: Observation
    tools: tuple[ToolSchema, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    n: int
    logprobs: bool
    stream: bool
    include_usage: bool

    @property
    def num_characters(self) -> int:
        """Of all text that a chat template shows, at least (count)."""
        calls = (call for message in self.messages for call in message.tool_calls)
        return sum(len(message.text) for message in self.messages) + sum(len(call.raw) for call in calls)


def read_chat(body: bytes | Mapping[str, JSON]) -> ChatRequest:
    """Parse a body, or the fields of one.

    Raises:
        RefusedError: it is invalid, exceeds a bound, or uses an unsupported feature.
    """
    chat = read(_Chat, body)
    _check_supported(chat)
    messages = _messages(cast("list[JSON]", chat.messages))
    tools = _tools(cast("list[JSON]", chat.tools or []))
    choice = cast("JSON", chat.tool_choice)
    if choice not in (None, "auto", "none"):
        raise RefusedError(
            f'`tool_choice` is "auto" or "none" here, not {reprlib.repr(choice)}; the model itself decides '
            "whether it calls a tool.",
            "unsupported_value",
        )
    limits = {limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise RefusedError("`max_tokens` and `max_completion_tokens` differ; give one of them.")
    stops = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    options = chat.stream_options or _StreamOptions()
    return ChatRequest(
        messages=messages,
        tools=() if choice == "none" else tools,
        max_tokens=next(iter(limits), None),
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=max(chat.top_k or 0, 0),
        seed=chat.seed,
        stop=stops,
        n=chat.n or 1,
        logprobs=bool(chat.logprobs),
        stream=bool(chat.stream),
        include_usage=bool(options.include_usage),
    )


def _check_supported(chat: _Chat) -> None:
    check_supported(chat.model_extra or {}, _NEUTRAL, _IGNORED)
    if chat.top_logprobs:
        raise RefusedError(
            "`top_logprobs` is 0 here: a reply has the logprobs of the sampled tokens alone.",
            "unsupported_value",
        )
    if chat.stream_options is not None and not chat.stream:
        raise RefusedError("`stream_options` needs `stream` = true; leave it out.")


def _messages(items: Sequence[JSON]) -> Observation:
    """The messages of a request. Results of tools get the names of the tools, which some templates show."""
    calls = [_calls(item, number) for number, item in enumerate(items, start=1)]
    plain = [_plain(item, number) for number, item in enumerate(items, start=1)]
    try:
        observation = messages_of(plain)
    except ValueError as error:
        raise RefusedError(f"`messages` {error}.") from None
    names: dict[str, str] = {}
    messages: list[Message] = []
    for number, (message, own) in enumerate(zip(observation, calls, strict=True), start=1):
        names |= {call.id: call.name for call in own}
        name = message.name
        if message.role == "tool":
            if message.tool_call_id is None:
                raise RefusedError(f"`messages` has a message {number} of a tool without its `tool_call_id`.")
            name = name or names.get(message.tool_call_id)
        messages.append(replace(message, tool_calls=own, name=name))
    return tuple(messages)


def _plain(item: JSON, number: int) -> JSON:
    """A message without its calls, with text alone, of the roles that this package has."""
    if not isinstance(item, dict):
        return item
    content = item.get("content")
    if isinstance(content, list):
        if len(content) > _MAX_CONTENT_PARTS:
            raise RefusedError(
                f"`messages` has a message {number} of more than {_MAX_CONTENT_PARTS:,} parts."
            )
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise RefusedError(
                f"`messages` has a message {number} with a part that is no text; this server takes text only."
            )
    role = "system" if item.get("role") == "developer" else item.get("role")
    return {**item, "role": role, "tool_calls": None}


def _calls(item: JSON, number: int) -> tuple[ToolCall, ...]:
    calls = item.get("tool_calls") if isinstance(item, dict) else None
    if not calls:
        return ()
    assert isinstance(item, dict), "its calls were found"
    if not isinstance(calls, list) or item.get("role") != "assistant" or len(calls) > MAX_CALLS:
        raise RefusedError(
            f"`messages` has a message {number} whose `tool_calls` is no list of up to {MAX_CALLS:,} calls "
            "of the assistant."
        )
    return tuple(_call(call, number) for call in calls)


def _call(item: JSON, number: int) -> ToolCall:
    call = item if isinstance(item, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    id, name, written = call.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(id, str) or not isinstance(name, str) or not name:
        raise RefusedError(f"`messages` has a message {number} with a call without an `id` or a name.")
    if not isinstance(written, str | dict):
        raise RefusedError(
            f"`messages` has a message {number} with a call whose `arguments` are no string of JSON."
        )
    raw = written if isinstance(written, str) else json.dumps(written)
    try:
        # Of a tool without parameters, some clients repeat no arguments at all.
        arguments = read_json(raw.strip() or "{}")
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return ToolCall(name, arguments, raw, id)
    # A model may have written them, so they are shown to it as they are.
    return ToolCall(name, None, raw, id, error="The arguments are no JSON object.")


def _tools(items: Sequence[JSON]) -> tuple[ToolSchema, ...]:
    try:
        described = tools_of([_with_parameters(item, number) for number, item in enumerate(items, start=1)])
        return tuple(schema_of(storable(tool)) for tool in described)
    except ValueError as error:
        raise RefusedError(f"`tools` {error}.") from None


def _with_parameters(item: JSON, number: int) -> JSON:
    """A tool with its parameters, which OpenAI's protocol lets a tool without any leave out."""
    tool = item if isinstance(item, dict) else {}
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RefusedError(
            f'`tools` has a tool {number} that is no {{"type": "function", "function": {{"name": "..."}}}}.'
        )
    if function.get("strict"):
        raise RefusedError(
            f"This server does not do `strict` = true, of tool {number}; leave it out: arguments are what "
            "the model writes.",
            "unsupported_parameter",
        )
    parameters = function.get("parameters")
    empty: JSON = {"type": "object", "properties": {}}
    return {"function": {**function, "parameters": empty if parameters is None else parameters}}
