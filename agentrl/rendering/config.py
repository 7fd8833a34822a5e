"""Settings of how conversations become tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from agentrl.config import Section, Spelling, chosen


class RenderingConfig(Section):
    """The form of turns."""

    dialect: Literal["own", "inline", "chat"] = "own"
    """own = the environment's; inline = tags in the assistant's own text, as Search-R1 and ReTool;
    chat = messages and calls in the model family's format."""
    chat_format: str = "auto"
    """Chat format of the model family (qwen3, llama-3, glm-4.5, ...); auto = detected from the tokenizer;
    template = the tokenizer's own chat template."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"apply_chat_template": chosen("dialect", "chat", "own")}

    @property
    def inactive(self) -> dict[str, str]:
        """The chat format, which has no effect with the inline dialect."""
        return {"chat_format": "with dialect = inline; choose another"} if self.dialect == "inline" else {}
