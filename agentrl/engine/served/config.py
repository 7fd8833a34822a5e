"""Settings of the engine's server, and the key of its control requests."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from agentrl.config import Section
from agentrl.errors import ConfigError

CONTROL_KEY = "AGENTRL_CONTROL_KEY"
"""The environment variable with the key, for the server and for runs that control it."""
_MIN_KEY_CHARS = 16


class Listening(Section):
    """The address of a server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30000
    """Port to listen on; 0 = any free one."""
    allowed_hosts: str = ""
    """Names by which clients address the server, beside localhost and its IP address (comma-separated)."""


class ServeSettings(Listening):
    """The address of the server, and its limits."""

    max_slots: Annotated[int, Field(ge=1)] = 64
    """Requests decoded at once (count); more of them wait in a queue."""
    max_context_len: Annotated[int, Field(ge=2)] = 2048
    """Most tokens of a request, prompt and completion together; the model may set a lower bound (tokens)."""
    enable_deterministic_inference: bool = False
    """Whether the tokens and logprobs of a request are the same, bit for bit, whatever else is decoded."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads that torch computes with (count); left out, 1 for small models, else every core."""


def control_key(variable: str = CONTROL_KEY) -> str | None:
    """A key of a server, of control requests by default, from the environment; None where there is none.

    Raises:
        ConfigError: it is too short to be secret, or no header can hold it.
    """
    key = os.environ.get(variable)
    if not key:
        return None
    if len(key) < _MIN_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{variable} must have at least {_MIN_KEY_CHARS} printable ASCII characters and no spaces."
        )
    return key


def control_headers() -> dict[str, str]:
    """The headers of control requests: with the key, where the environment has one.

    Raises:
        ConfigError: as in `control_key`.
    """
    key = control_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}
