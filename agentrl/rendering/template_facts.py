"""What a chat template does, found out by showing it small conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentrl.errors import UserError
from agentrl.types import JSON

MARK = "zqmarkqz"
"""A word that no conversation holds."""

Chat = list[dict[str, JSON]]
_QUESTION: dict[str, JSON] = {"role": "user", "content": "?"}
_PROBE = "zqprobeqz"
_THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls stand in text: a JSON object with these keys between two delimiters, which may be empty."""

    opening: str
    closing: str
    name_key: str
    arguments_key: str


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """close: the special token that ends a turn. calls: None where the template shows no tools."""

    close: str
    calls: CallFormat | None


class ChatTemplate:
    """A tokenizer's chat template.

    Raises:
        UserError: the tokenizer has none, or it refuses a conversation.
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
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    cast("list[dict[str, str]]", messages),
                    tools=_as_dicts(tools) or None,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the tokenizer's chat template refuses a conversation of {[m['role'] for m in messages]}: "
                f"{error}; use another dialect or model."
            ) from error

    def facts(self) -> TemplateFacts:
        """How it ends turns and writes calls."""
        said = self.text([_QUESTION, {"role": "assistant", "content": MARK}], prompt=False)
        after = said.rpartition(MARK)[2]
        special = [token for token in self._tokenizer.get_added_vocab() if after.startswith(token)]
        if not special:
            raise UserError(
                "the tokenizer's chat template ends a turn with no special token, so nothing could stop the "
                "model there; use the environment's inline dialect."
            )
        close = max(special, key=len)
        return TemplateFacts(close, self._call_format(close))

    def answered(self, roles: Sequence[str], *, reasoning: bool = False) -> Chat:
        """A question and a turn that ends in MARK, or has it as reasoning, to be answered by these roles."""
        turn: dict[str, JSON] = {"role": "assistant", "content": "" if "tool" in roles else MARK}
        if "tool" in roles:
            turn["tool_calls"] = [_call({_PROBE: MARK}, n) for n in range(roles.count("tool"))]
        if reasoning:
            turn["reasoning_content"] = MARK
            turn["content"] = "" if "tool" in roles else "."
        return [_QUESTION, turn]

    def _call_format(self, close: str) -> CallFormat | None:
        schema: JSON = {"type": "object", "properties": {_PROBE: {"type": "string"}}}
        tool: JSON = {
            "type": "function",
            "function": {"name": _PROBE, "description": "?", "parameters": schema},
        }
        asked = self.text([_QUESTION], [tool], prompt=True)
        if _PROBE not in asked:
            return None
        told: Chat = [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [_call({_PROBE: MARK}, 0)]},
        ]
        body = self.text(told, [tool], prompt=False).rpartition(MARK)
        start = _start_of_object(body[0] + body[1] + body[2])
        if start is None:
            return None
        text = "".join(body)
        found, end = json.JSONDecoder().raw_decode(text, start)
        before = text[:start].removeprefix(asked).rpartition(_THINK_END)[2].strip()
        name = next(key for key, value in found.items() if value == _PROBE)
        arguments = next(key for key, value in found.items() if isinstance(value, dict))
        return CallFormat(before, text[end:].partition(close)[0].strip(), name, arguments)


def _as_dicts(tools: Sequence[JSON]) -> list[dict[str, JSON] | Callable[..., object]]:
    return [tool for tool in tools if isinstance(tool, dict)]


def _call(arguments: JSON, index: int) -> JSON:
    return {
        "type": "function",
        "id": f"call_{index}",
        "function": {"name": _PROBE, "arguments": arguments},
    }


def _start_of_object(text: str) -> int | None:
    """Where the JSON object begins that names the probe and holds the last MARK as an argument."""
    last = text.rfind(MARK)
    start = text.rfind("{", 0, last)
    while start >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            found, end = None, 0
        if end > last and isinstance(found, dict) and {_PROBE: MARK} in found.values():
            return start
        start = text.rfind("{", 0, start)
    return None
