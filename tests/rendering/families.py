"""A renderer of each family of the library, over a small tokenizer with its special tokens."""

from __future__ import annotations

import copy
import re
from functools import lru_cache

from tokenizers import AddedToken

from agentrl import UserError
from agentrl.rendering.chat import FamilyRenderer, families
from tests.rendering.subjects import tokenizer

MISSING = re.compile(r"[Tt]oken '([^']+)' not found|(?:single|one) token for '([^']+)'")
_MOST_TOKENS = 60


@lru_cache
def family_renderer(family: str) -> FamilyRenderer:
    """The renderer of a family. Its tokenizer gets each token whose absence the family reports."""
    words = copy.deepcopy(tokenizer("byte-level", ("<|end|>",), "<|end|>"))
    for _ in range(_MOST_TOKENS):
        try:
            return FamilyRenderer(words, family)
        except UserError as error:
            ((first, second),) = MISSING.findall(str(error))
            missing = first or second
            words.add_tokens([AddedToken(missing, normalized=False, special=True)])
    raise AssertionError(f"{family} asks for more than {_MOST_TOKENS} tokens")


class _Tokens(dict[str, tuple[str, ...]]):
    def __missing__(self, family: str) -> tuple[str, ...]:
        added = family_renderer(family)._tokenizer.get_added_vocab()
        self[family] = tuple(token for token in added if token != "<|end|>")
        return self[family]


FAMILY_TOKENS = _Tokens()
"""The special tokens of each family, by its name."""

assert families()
