"""Settings of the engine's server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.config import Section


class ServeSettings(Section):
    """The address of the server, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30000
    """Port to listen on; 0 = any free one."""
    max_slots: Annotated[int, Field(ge=1)] = 64
    """Requests decoded at once (count); more of them wait in a queue."""
    max_context_len: Annotated[int, Field(ge=2)] = 2048
    """Most tokens of a request, prompt and completion together; the model may set a lower bound (tokens)."""
    enable_deterministic_inference: bool = False
    """Whether the tokens and logprobs of a request are the same, bit for bit, whatever else is decoded."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads that torch computes with (count); left out, 1 for small models, else every core."""
