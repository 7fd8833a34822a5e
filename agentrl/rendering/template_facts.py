"""The form of turns and calls in a chat template, determined by rendering small conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentrl.errors import ConfigError, UserError
from agentrl.types import JSON

_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""What a template gets from whoever renders a conversation."""
MARK = "zqmarkqz"
"""A string that does not occur in conversations."""

Chat = list[dict[str, JSON]]
_QUESTION: dict[str, JSON] = {"role": "user", "content": "?"}
PROBE = "zqprobeqz"
"""The name of the tool and of its argument in probes."""
_SHORT = "."
_TODAY = "26 Jul 2024"
"""Today in templates that let it be set, as those of Llama 3, whose default this is. By the clock, the same
conversation would have other tokens tomorrow."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The form of calls: a JSON object with these keys between two delimiters, which may be empty."""

    opening: str
    closing: str
    name_key: str
    arguments_key: str


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The form of a template's turns.

    close: the special token that ends an answer. call_close: the one that ends a turn with calls.
    header: the markup between the prompt and an answer, such as `<|channel|>final<|message|>`; "" = none.
    thought: the markup between the prompt and a thought, and between that and the answer; "" = `<think>`,
    or none.
    calls: None where the template renders no tools, or writes calls in another form than JSON objects.
    several: whether one turn may hold several calls.
    """

    close: str
    call_close: str
    header: str
    thought: tuple[str, str]
    calls: CallFormat | None = None
    several: bool = False


def with_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, JSON]
) -> PreTrainedTokenizerBase:
    """The tokenizer, whose template has these arguments as well, such as `enable_thinking`.

    Raises:
        ConfigError: it has no template, or an argument is none of a template's own.
    """
    if not arguments:
        return tokenizer
    if tokenizer.chat_template is None:
        raise ConfigError(
            "apply_chat_template_kwargs has no effect: the tokenizer has no chat template; drop it."
        )
    for name in arguments:
        if not name.isidentifier() or name in _OURS:
            raise ConfigError(
                f"apply_chat_template_kwargs has {name!r}, which no chat template takes from its caller; "
                "name variables of the template, such as enable_thinking."
            )
    # Jinja reads Python's literals.
    settings = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in arguments.items())
    changed = copy(tokenizer)
    templates = tokenizer.chat_template
    changed.chat_template = (
        {name: settings + text for name, text in templates.items()}
        if isinstance(templates, dict)
        else settings + templates
    )
    return changed


class ChatTemplate:
    """A tokenizer's chat template, with its defaults, and one fixed day.

    Content is a string, or a list of one part where the template reads only parts, as those of some models
    that see images do.

    Raises:
        UserError: the tokenizer has none, it refuses a conversation, or it leaves out what a user says.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template, so it cannot speak the chat dialect; "
                "use an instruct model, or the environment's inline dialect."
            )
        self._tokenizer = tokenizer

    def text(self, messages: Chat, tools: Sequence[JSON] = (), *, prompt: bool) -> str:
        """The conversation as text; with `prompt`, up to where the assistant begins to write."""
        chat = [_in_parts(message) for message in messages] if self._reads_parts else messages
        try:
            return self._render(chat, tools, prompt=prompt)
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the tokenizer's chat template refuses a conversation of {[m['role'] for m in messages]}: "
                f"{error}; use another dialect or model."
            ) from error

    def _render(self, messages: Chat, tools: Sequence[JSON] = (), *, prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                cast("list[dict[str, str]]", messages),
                tools=_as_dicts(tools) or None,
                add_generation_prompt=prompt,
                tokenize=False,
                date_string=_TODAY,
            )
        )

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template shows content only where it is a list of parts."""
        question: dict[str, JSON] = {"role": "user", "content": MARK}
        texts: list[str] = []
        for message in (question, _in_parts(question)):
            try:
                texts.append(self._render([message], prompt=True))
            except (TemplateError, TypeError, ValueError):
                continue
            if MARK in texts[-1]:
                return message is not question
        if not texts:
            return False  # it refuses both, and says why where it is used
        raise UserError(
            "the tokenizer's chat template shows the model nothing of what a user says, neither as text nor "
            "as a list of parts; use another model, or mend its chat template."
        )

    def facts(self) -> TemplateFacts:
        """Determine how the template ends turns and writes calls."""
        answer = self.text([_QUESTION, {"role": "assistant", "content": MARK}], prompt=False)
        close = self._special_at(answer.rpartition(MARK)[2])
        if close is None:
            raise UserError(
                "the tokenizer's chat template ends a turn with no special token, so nothing could stop the "
                "model there; use the environment's inline dialect."
            )
        facts = TemplateFacts(close, close, *self._headers(answer))
        tool = _probe_tool()
        if PROBE not in self.text([_QUESTION], [tool], prompt=True):
            return facts
        calls = _call_format(self.text([_QUESTION, _calling(1, content=MARK)], [tool], prompt=False))
        if calls is None:
            return facts
        form, after = calls
        # The call's own closing tag may be a special token too: the turn ends with the last one.
        ends = [token for token in self._tokenizer.get_added_vocab() if token in after]
        call_close = max(ends, key=after.rindex, default=close)
        closing = after.rpartition(call_close)[0].strip()
        calls_form = replace(form, closing=closing)
        return replace(facts, call_close=call_close, calls=calls_form, several=self._takes_two())

    def _headers(self, answer: str) -> tuple[str, tuple[str, str]]:
        prompt = self.text([_QUESTION], prompt=True)
        thinking = self.text(probe_turn(0, reasoning=True), prompt=False)
        # A template may open an answer with an empty thought: that one is read by its tags.
        if not answer.startswith(prompt) or not thinking.startswith(prompt) or "<think>" in thinking:
            return "", ("", "")
        header = answer.removeprefix(prompt).partition(MARK)[0]
        opening, mark, after = thinking.removeprefix(prompt).partition(MARK)
        closing = after.partition(_SHORT)[0]
        return header if self._holds_markup(header) else "", (opening, closing) if mark else ("", "")

    def _holds_markup(self, text: str) -> bool:
        return any(token.strip() and token in text for token in self._tokenizer.get_added_vocab())

    def _takes_two(self) -> bool:
        results: Chat = [{"role": "tool", "content": "?", "tool_call_id": f"call_{n}"} for n in range(2)]
        try:
            text = self.text([_QUESTION, _calling(2), *results], [_probe_tool()], prompt=True)
        except UserError:
            return False
        return text.count(MARK) >= 2

    def _special_at(self, text: str) -> str | None:
        special = [token for token in self._tokenizer.get_added_vocab() if text.startswith(token)]
        return max(special, key=len, default=None)


def probe_turn(calls: int, *, reasoning: bool = False) -> Chat:
    """A question and a turn of `calls` calls whose argument is MARK; of 0 calls, MARK is the content.

    reasoning: MARK is the turn's reasoning, too, and not its content.
    """
    turn = _calling(calls)
    if not calls:
        turn = {"role": "assistant", "content": _SHORT if reasoning else MARK}
    if reasoning:
        turn["reasoning_content"] = MARK
    return [_QUESTION, turn]


def _probe_tool() -> JSON:
    schema: JSON = {"type": "object", "properties": {PROBE: {"type": "string"}}}
    return {"type": "function", "function": {"name": PROBE, "description": "?", "parameters": schema}}


def _calling(calls: int, content: str = "") -> dict[str, JSON]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [_call({PROBE: MARK}, n) for n in range(calls)],
    }


def _call_format(text: str) -> tuple[CallFormat, str] | None:
    """The form of the call in a rendered turn, without its closing, and the text after it."""
    start = _start_of_object(text)
    if start is None:
        return None
    call, end = json.JSONDecoder().raw_decode(text, start)
    name = next((key for key, value in call.items() if value == PROBE), None)
    arguments = next((key for key, value in call.items() if value == {PROBE: MARK}), None)
    _, mark, opening = text[:start].rpartition(MARK)
    if name is None or arguments is None:
        return None
    if not mark:
        # The template omits the content of a turn with a call: the call is the whole turn.
        opening = ""
    # Objects in a list of calls have no delimiters of their own.
    return (
        None
        if opening.strip().endswith("[")
        else (CallFormat(opening.strip(), "", name, arguments), text[end:])
    )


def _in_parts(message: dict[str, JSON]) -> dict[str, JSON]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _as_dicts(tools: Sequence[JSON]) -> list[dict[str, JSON] | Callable[..., object]]:
    return [tool for tool in tools if isinstance(tool, dict)]


def _call(arguments: JSON, index: int) -> JSON:
    return {
        "type": "function",
        "id": f"call_{index}",
        "function": {"name": PROBE, "arguments": arguments},
    }


def _start_of_object(text: str) -> int | None:
    """The start of the JSON object with the probe's name and the last MARK as an argument."""
    last = text.rfind(MARK)
    start = text.rfind("{", 0, last)
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            value, end = None, 0
        if end > last and isinstance(value, dict) and {PROBE: MARK} in value.values():
            return start
        start = text.rfind("{", 0, start)
    return None
