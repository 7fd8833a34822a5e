"""The inline dialect in tokens: the world writes into the assistant's own text.

    <prompt> <search>Kalor Mendos born</search> <information>...</information> <answer>Tirak</answer>
    world    policy                             world                          policy

A turn ends with the closing tag of a tool or of the answer. Where that tag is one token of
the tokenizer it is a stop token, elsewhere a stop string, whose tokens are kept as sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from agentrl.envs.dialect import Tags, closing, opening
from agentrl.protocols import Stops, ToolSchema
from agentrl.types import JSON, Message, Observation, ToolCall

_CACHED_TEXTS = 16_384
_DEEPEST = 64


class InlineRenderer:
    """A Renderer for `Tags` over a tokenizer.

    The first prompt goes through the tokenizer's chat template where it has one. What the
    world adds later stands between the result tags, without any chat markup.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: Tags) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        # Prompts and results recur: siblings share prompts, searches find the same documents.
        self._encode = lru_cache(_CACHED_TEXTS)(self._encode_once)
        self._stops = lru_cache(64)(self._find_stops)

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """The closing tags of the tools and of the answer, and the end-of-text token."""
        return self._stops(tuple(tool.name for tool in tools))

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The prompt's tokens, up to where the assistant begins to write."""
        del tools
        if self._tokenizer.chat_template is None:
            return list(self._encode("\n".join(message.content for message in messages) + "\n"))
        turns = [{"role": message.role, "content": message.content} for message in messages]
        text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(self._encode(str(text)))

    def extend(self, observation: Observation) -> list[int]:
        """The world's answers, each between the result tags."""
        texts = [_between(self._tags.result, message.content) for message in observation]
        return [token for text in texts for token in self._encode(text)]

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Message:
        """The first complete tag of a turn; what stands before it is reasoning.

        A turn without one comes back as a ToolCall with an error for the model to read.
        """
        text = self.decode(ids)
        names = tuple(tool.name for tool in tools)
        tags = "|".join(map(re.escape, (*names, self._tags.answer)))
        found = re.search(rf"<({tags})>(.*?)</\1>", text, re.DOTALL)
        if found is None:
            return Message("assistant", tool_calls=(self._malformed(text, names),))
        reasoning = text[: found.start()].strip() or None
        name, inner = found[1], found[2]
        if name == self._tags.answer:
            return Message("assistant", inner.strip(), reasoning=reasoning)
        schema = next(tool for tool in tools if tool.name == name)
        return Message("assistant", reasoning=reasoning, tool_calls=(_read_call(schema, inner, found[0]),))

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of an action as a policy would have sampled them, closing tag included.

        Raises:
            ValueError: a call whose arguments could not be read has no canonical form.
        """
        parts = [action.reasoning or ""]
        schemas = {tool.name: tool for tool in tools}
        for tool_call in action.tool_calls:
            if tool_call.arguments is None:
                raise ValueError(f"cannot write the malformed call {tool_call.raw!r}")
            parts.append(_between(tool_call.name, _write_arguments(tool_call, schemas)))
        if not action.tool_calls:
            parts.append(_between(self._tags.answer, action.content))
        return list(self._encode("".join(parts)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _encode_once(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_stops(self, names: tuple[str, ...]) -> Stops:
        tags = [closing(name) for name in (*names, self._tags.answer)]
        encoded = {tag: self._encode(tag) for tag in tags}
        strings = tuple(tag for tag, ids in encoded.items() if len(ids) > 1)
        tokens = {ids[0] for ids in encoded.values() if len(ids) == 1}
        if self._tokenizer.eos_token_id is not None:
            tokens.add(int(self._tokenizer.eos_token_id))
        return Stops(strings, tuple(sorted(tokens)))

    def _malformed(self, text: str, names: tuple[str, ...]) -> ToolCall:
        forms = " or ".join(_between(name, "...") for name in (*names, self._tags.answer))
        return ToolCall("", None, raw=text, error=f"Nothing to do was found in that; write {forms}.")


def _between(tag: str, text: str) -> str:
    # The blank lets most tokenizers write the first word with the token it has in running text.
    return f"{opening(tag)} {text}{closing(tag)}"


def _write_arguments(tool_call: ToolCall, schemas: Mapping[str, ToolSchema]) -> str:
    arguments = tool_call.arguments or {}
    if not arguments:
        return ""
    schema = schemas.get(tool_call.name)
    if len(arguments) == 1 and (schema is None or len(_parameters(schema)) == 1):
        (value,) = arguments.values()
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(dict(arguments), ensure_ascii=False)


def _parameters(schema: ToolSchema) -> Mapping[str, JSON]:
    properties = schema.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _takes_text(definition: JSON) -> bool:
    if not isinstance(definition, dict):
        return False
    choices = definition.get("anyOf")
    return definition.get("type") == "string" or (
        isinstance(choices, list) and any(map(_takes_text, choices))
    )


def _read_call(schema: ToolSchema, inner: str, raw: str) -> ToolCall:
    parameters = _parameters(schema)
    if len(parameters) == 1 and (inner.strip() or schema.parameters.get("required")):
        ((name, definition),) = parameters.items()
        value = inner.strip() if _takes_text(definition) else _json_or_text(inner)
        return ToolCall(schema.name, {name: value}, raw=raw)
    value = _json_or_text(inner) if inner.strip() else {}
    if isinstance(value, dict):
        return ToolCall(schema.name, value, raw=raw)
    wanted = ", ".join(parameters)
    error = f"<{schema.name}> takes a JSON object with {wanted or 'no fields'}, not {inner.strip()[:80]!r}."
    return ToolCall(schema.name, None, raw=raw, error=error)


def _json_or_text(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
        # Half a surrogate pair can be escaped in JSON, but neither encoded nor written to a file.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text.strip()
    # What is nested deeper than any argument would overflow the stack of who checks or stores it.
    return value if _is_nested_at_most(_DEEPEST, value) else text.strip()


def _is_nested_at_most(depth: int, value: JSON) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_nested_at_most(depth - 1, inner) for inner in below)
