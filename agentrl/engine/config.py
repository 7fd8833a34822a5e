"""The engine's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config import Section


class EngineConfig(Section):
    """Which engine samples, and how much memory its cache may take."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """The inference engine; `embedded` decodes in this process, on the CPU. `sglang` is a server that runs
    already, at sglang_url: for eval-only runs."""

    sglang_url: str | None = None
    """Address of an SGLang server, of `agentrl serve` or of a router, e.g. http://127.0.0.1:30000. It serves
    the weights of the model that is scored."""

    max_slots: int = Field(default=256, ge=1)
    """Requests decoded at once, or sent to a server at once; more of them wait in a queue (count)."""

    max_context_len: int | None = Field(default=None, ge=2)
    """Tokens one slot's cache holds, prompt and completion together; none = the episode's limit."""

    @model_validator(mode="after")
    def _an_address_belongs_to_sglang(self) -> EngineConfig:
        if (self.engine == "sglang") != (self.sglang_url is not None):
            raise ValueError(
                f"engine = {self.engine} and sglang_url = {self.sglang_url or 'none'} do not fit: a server's "
                "address needs engine = sglang, and the other way round."
            )
        return self
