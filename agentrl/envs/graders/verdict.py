"""What a judge reads and writes: texts that cannot end their block, and a verdict that no text can forge.

A text of a model may hold anything: the end of its block, the markers of a chat template, a verdict. So each
text stands between two lines with its own hash, and a verdict counts only with the hash of all texts. No text
holds a hash of itself: none ends its block, and a judge that repeats one gives no verdict by that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Generic, TypeVar

from agentrl.types import JSON

T = TypeVar("T")

_KEY_CHARS = 12
_MAX_JSON_CHARS = 100_000
_MAX_WORDS_CHARS = 4000
_WORD_JOINER = "\u2060"
# Special tokens of chat templates, and what looks like one: <|im_end|>, </s>, [INST], [|user|], ]~b].
# Only their first character is matched, since they may overlap.
_MARKUP = re.compile(
    r"<(?=[|\uff5c]|[^\s<>]{1,80}>)"
    r"|\[(?=/?[A-Z][A-Z0-9_]{2,60}\]|(?:[a-z]MASK|multimodal)\]|\||e~\[)"
    r"|\](?=~!?b[\[\]])"
)


def quoted(text: str) -> str:
    """The text between two lines that it cannot hold, with its markers of chat templates disarmed.

    An invisible word joiner behind the first character keeps a marker legible and breaks the special token.
    """
    shown = _MARKUP.sub(lambda match: match[0] + _WORD_JOINER, text)
    line = f"----- {_hash(shown)}"
    return f"{line}\n{shown}\n{line}"


@dataclass(frozen=True)
class Form(Generic[T]):
    """The form of a verdict.

    name: of its value, such as `score`. values: the sentence that says what N is. schema: of N, in JSON.
    read: the verdict of what was written for N; None = there is none.
    """

    name: str
    values: str
    schema: JSON
    read: Callable[[str], T | None]


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A prompt, and the verdict that is asked for.

    texts: all texts of the prompt that others wrote.
    """

    prompt: str
    form: Form[T]
    texts: tuple[str, ...]
    _key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", _hash(*self.texts))

    @property
    def response_format(self) -> JSON:
        """The field of a request by which an endpoint keeps to the schema, the same for every prompt."""
        text: JSON = {"type": "string"}
        properties = {"explanation": text, "key": text, self.form.name: self.form.schema}
        schema: JSON = {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}

    @property
    def as_json(self) -> str:
        """The prompt, which asks for the verdict as JSON."""
        return (
            f"{self.prompt}\n\nReply with one JSON object, with a paragraph that explains it: "
            f'{{"explanation": "...", "key": "{self._key}", "{self.form.name}": N}}. {self.form.values}\n'
        )

    @property
    def in_words(self) -> str:
        """The prompt, which asks for the verdict as a line of a text."""
        return (
            f"{self.prompt}\n\nExplain your verdict in one paragraph. Then write a last line of this form. "
            f"{self.form.values}\n\n{self.form.name.capitalize()} {self._key}: N\n"
        )

    def is_json(self, reply: str) -> bool:
        """Whether a reply keeps to the schema."""
        return self._fields(reply) is not None

    def is_keyed(self, reply: str) -> bool:
        """Whether it does with the key, which nothing has that a judge repeats of a text."""
        match self._fields(reply):
            case [_, self._key, _]:
                return True
        return False

    def read_json(self, reply: str) -> T | None:
        """The verdict of a keyed reply; None where it has none."""
        match self._fields(reply):
            case [_, self._key, (str() | int() | float()) as value] if not isinstance(value, bool):
                return self.form.read(str(value))
        return None

    def read_words(self, reply: str) -> T | None:
        """The verdict in the last line of a reply that has the key."""
        line = rf"\b{self.form.name}[\"'*`\s]{{0,4}}{self._key}[\"'*`]{{0,4}}\s{{0,4}}[:=](.{{0,80}})"
        found = re.findall(line, reply[-_MAX_WORDS_CHARS:], re.IGNORECASE)
        return self.form.read(found[-1]) if found else None

    def _fields(self, reply: str) -> list[JSON] | None:
        if len(reply) > _MAX_JSON_CHARS:
            return None
        try:
            # A name may stand there twice, once by an unescaped text; so the pairs are compared.
            pairs = json.loads(reply, object_pairs_hook=_Pairs)
        except (ValueError, RecursionError):
            return None
        if not isinstance(pairs, _Pairs) or [name for name, _ in pairs] != [
            "explanation",
            "key",
            self.form.name,
        ]:
            return None
        return [value for _, value in pairs]


class _Pairs(list[tuple[str, JSON]]):
    """The members of a JSON object, in their order."""


def _hash(*texts: str) -> str:
    return sha256(json.dumps(texts).encode()).hexdigest()[:_KEY_CHARS]
