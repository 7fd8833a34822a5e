"""The engine's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config import Section


class EngineConfig(Section):
    """Which engine samples, and how much memory its cache may take."""

    engine: Literal["embedded"] = "embedded"
    """The inference engine; `embedded` decodes in this process, on the CPU."""

    max_slots: int = Field(default=256, ge=1)
    """Requests decoded at once; more of them wait in a queue."""

    max_context_len: int | None = Field(default=None, ge=2)
    """Tokens one slot's cache holds, prompt and completion together; none = the episode's limit."""
