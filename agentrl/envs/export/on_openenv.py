"""An environment here as a package of OpenEnv 0.10: an exported `server/app.py` calls these two."""

from __future__ import annotations

import os
from collections.abc import Mapping

from starlette.types import ASGIApp

from agentrl.envs.openenv.config import ServeEnv
from agentrl.envs.openenv.server import env_application, serve_env
from agentrl.tools.secrets import with_secrets
from agentrl.types import JSON

_HOST = "SPACE_HOST"
"""The environment variable in which a Space of Hugging Face has its name."""


def application(env_id: str, kwargs: Mapping[str, JSON]) -> ASGIApp:
    """The application, for any ASGI server, as `agentrl serve-env` serves it.

    Raises:
        UserError: there is no such environment, or it does not take these arguments.
    """
    return env_application(env_id, with_secrets(kwargs), _settings())


def run(env_id: str, kwargs: Mapping[str, JSON]) -> None:
    """Serve it on this machine at port 8000, until it is interrupted.

    Raises:
        UserError: there is no such environment, it does not take these arguments, or the port is taken.
    """
    serve_env(env_id, with_secrets(kwargs), _settings(), ready=print)


def _settings() -> ServeEnv:
    return ServeEnv(allowed_hosts=os.environ.get(_HOST, ""))
