"""Settings of `agentrl serve-env`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.engine.served.config import Listening

ENV_KEY = "AGENTRL_ENV_KEY"
"""The environment variable with the key of a served environment; without it, whoever reaches it plays."""


class ServeEnv(Listening):
    """The address of a served environment, its tasks, and its sessions."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 = any free one."""
    split: str = ""
    """Split of the tasks, where a reset names none; left out, `train`, or the first one."""
    agent: str = ""
    """The agent that clients play, in an environment of several; left out, the first one."""
    max_sessions: Annotated[int, Field(ge=1)] = 4096
    """Sessions at once (count); another one is refused as OpenEnv refuses it, and may try again."""
    idle_s: Annotated[float, Field(gt=0.0)] = 600.0
    """A session ends when it has had no request for so long (seconds)."""
