"""Settings of how conversations become tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from agentrl.config import IN_COMMAS, Section, Spelling, chosen
from agentrl.types import JSON


def _listed(value: object) -> object:
    """The strings in the text of a flag: a list in JSON, or one string."""
    if not isinstance(value, str):
        return value
    if not value.startswith("["):
        return (value,)
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{value} is no list in JSON ({error}); write one, or one string.") from None


class StopChoice(Section):
    """What ends a turn of the model, beside what its dialect ends it with."""

    rollout_stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)] = ()
    """Strings that end a turn, too, and stay part of it: ["</search>", "</answer>"] (a flag: JSON, or one
    string). In evaluations as well."""
    rollout_stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], IN_COMMAS] = ()
    """Token ids that end a turn, too, and stay part of it (a flag: with commas between them)."""


class RenderingConfig(StopChoice):
    """The form of turns."""

    dialect: Literal["own", "inline", "chat"] = "own"
    """own = the environment's; inline = tags in the assistant's own text, as Search-R1 and ReTool;
    chat = messages and calls in the model family's format."""
    chat_format: str = "auto"
    """Chat format of the model family (qwen3, llama-3, glm-4.5, ...); auto = detected from the tokenizer;
    template = the tokenizer's own chat template."""

    apply_chat_template_kwargs: dict[str, JSON] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template, such as {"enable_thinking": false} (a flag: JSON)."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"apply_chat_template": chosen("dialect", "chat", "own")}

    @property
    def inactive(self) -> dict[str, str]:
        """The chat format, which has no effect with the inline dialect."""
        return {"chat_format": "with dialect = inline; choose another"} if self.dialect == "inline" else {}
