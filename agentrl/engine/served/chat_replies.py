"""Replies of /v1/chat/completions, in OpenAI's protocol: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentrl.types import JSON, Completion, Finish, Message, ToolCall

Body = dict[str, JSON]

ID_CHARS = 9
"""Of a call: templates of Mistral refuse ids of another form."""
_THINK, _THINK_END = "<think>", "</think>"
_TAIL = 8
# Half of a character that takes several tokens is decoded as this.
_HALF = "\ufffd"
_CALL_BEGINS = re.compile(r"[<\[{]")
_LONGEST_TAG = 32


class ReplyTurn(NamedTuple):
    """What the model wrote, parsed. is_open: the rest of it may still turn the content into reasoning."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    is_open: bool


def turn_of(
    message: Message, text: Callable[[], str], stopped_by: str | None, id_of: Callable[[int], str] | None
) -> ReplyTurn:
    """What a client is shown of a parsed turn.

    A call that cannot be read, and one that no tool was offered for, is part of the content.

    text: of the turn, without special tokens. stopped_by: the client's own string that has ended it, which it
    is not shown. id_of: the id of the call of this number, by which results name it in the whole
    conversation: a renderer numbers those of one turn. None = no tool was offered.
    """
    content, reasoning, calls = message.text, message.reasoning or "", tuple[ToolCall, ...]()
    if message.tool_calls and id_of is None:
        whole = text()
        content = (whole.partition(_THINK_END)[2] if reasoning and _THINK_END in whole else whole).strip()
    elif id_of is not None:
        readable = [call for call in message.tool_calls if call.arguments is not None]
        unreadable = (call.raw for call in message.tool_calls if call.arguments is None)
        content = "\n".join(filter(None, (content, *unreadable)))
        calls = tuple(replace(call, id=id_of(number)) for number, call in enumerate(readable))
    if stopped_by is not None:
        reasoning, found, _ = reasoning.partition(stopped_by)
        content = "" if found else content.partition(stopped_by)[0]
    return ReplyTurn(content, reasoning, calls, False)


def is_thinking(decode: Callable[[list[int]], str], prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether a thought is open: some formats take its text for content until its end is there.

    decode: special tokens included. prompt, ids: before the reply, and of it so far.
    """
    text = decode(list(ids))
    opens = decode(list(prompt[-_TAIL:])).rstrip().endswith(_THINK)
    return (opens or text.lstrip().startswith(_THINK)) and _THINK_END not in text


class ReplyHead(NamedTuple):
    """The fields that the parts of a reply share. created: in seconds since 1970."""

    id: str
    model: str
    created: int

    def body(self, kind: str, choices: Sequence[JSON]) -> Body:
        """A reply, or a chunk of one."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


def message_of(turn: ReplyTurn) -> Body:
    """The message of a choice."""
    message: Body = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_call(call) for call in turn.calls]
    return message


def finish_of(turn: ReplyTurn, completion: Completion) -> str:
    """The `finish_reason`."""
    if completion.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if turn.calls else "stop"


def usage_of(num_prompt_tokens: int, completions: Sequence[Completion]) -> Body:
    """The usage of all choices, whose prompt counts once."""
    num_sampled = sum(len(completion.token_ids) for completion in completions)
    cached = max((completion.cached_tokens for completion in completions), default=0)
    return usage_body(num_prompt_tokens, num_sampled, cached)


def usage_body(num_prompt_tokens: int, num_sampled: int, num_cached: int) -> Body:
    """The usage of a reply by its counts of tokens. num_cached: of the prompt."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def choice(index: int, turn: ReplyTurn, completion: Completion, logprobs: JSON) -> Body:
    """A choice of a whole reply."""
    return {
        "index": index,
        "message": message_of(turn),
        "logprobs": logprobs,
        "finish_reason": finish_of(turn, completion),
    }


def chunk_part(
    index: int, delta: Mapping[str, JSON], logprobs: JSON, finish_reason: str | None = None
) -> JSON:
    """One choice in a chunk of a stream. delta: what it has more."""
    return {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": finish_reason}


def event_of(body: Mapping[str, JSON]) -> str:
    """A body as a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def token_logprob(text: str, logprob: float) -> JSON:
    """The logprob of a sampled token. Half a character has no bytes of its own."""
    whole: list[JSON] | None = None if _HALF in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": whole, "top_logprobs": []}


def arguments_of(call: ToolCall) -> str:
    """The arguments of a call as a client is sent them."""
    return json.dumps(dict(call.arguments or {}), ensure_ascii=False)


def _call(call: ToolCall) -> Body:
    function: JSON = {"name": call.name, "arguments": arguments_of(call)}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(slots=True)
class Deltas:
    """The parts of one choice: each is what the turn has more than was sent, as far as that is certain.

    calls_tools: the model may call tools; from where a call may begin, text is held until the turn ends.
    stop: strings that end the content; their beginning is held, too.
    """

    calls_tools: bool
    stop: Sequence[str] = ()
    _content: str = field(default="", init=False)
    _reasoning: str = field(default="", init=False)

    def next(self, turn: ReplyTurn, *, ended: bool) -> Iterator[Body]:
        """What has been added. Where a turn took sent content back, its own follows as a whole."""
        reasoning = turn.reasoning if ended else self._certain(turn.reasoning)
        if reasoning != self._reasoning and reasoning.startswith(self._reasoning):
            yield {"reasoning_content": reasoning[len(self._reasoning) :]}
            self._reasoning = reasoning
        content = turn.content if ended else self._certain(turn.content)
        if not ended and (turn.is_open or turn.calls or not content.startswith(self._content)):
            return
        added = content[len(self._content) :] if content.startswith(self._content) else content
        if added:
            yield {"content": added}
            self._content = content
        if ended and turn.calls:
            yield {"tool_calls": [{"index": index, **_call(call)} for index, call in enumerate(turn.calls)]}

    def _certain(self, text: str) -> str:
        """The beginning of a text that no further token changes."""
        text = text.rstrip(_HALF)
        begins = _CALL_BEGINS.search(text) if self.calls_tools else None
        tag = begins.start() if begins else text.rfind("<", max(len(text) - _LONGEST_TAG, 0))
        held = max(map(len, self.stop), default=1) - 1
        # A turn loses the white space before a call, and at its end.
        return text[: max(min(tag if tag >= 0 else len(text), len(text) - held), 0)].rstrip()
