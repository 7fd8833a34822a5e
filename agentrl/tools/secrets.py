"""Secrets among the arguments of tools: named by environment variables, "$NAME", and written nowhere.

The folder of a run holds the arguments of its tools as they were configured, in config.toml and report.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from string import Template

from agentrl.errors import ConfigError
from agentrl.types import JSON

_TABLES = ("env", "headers")
_SECRET = re.compile(
    r"(?:^|[_-])(?:password|passwd|secret|authorization|credentials)$"
    r"|(?:^|[_-])(?:api|access|auth|bearer|private|secret)[_-]?(?:key|token)$",
    re.IGNORECASE,
)
_SECRET_IN_TABLE = re.compile(
    r"(?:key|token|secret|password|passwd|pwd|authorization|credentials?|cookie)$", re.IGNORECASE
)


def literal_secret(arguments: Mapping[str, JSON], *, in_table: bool = False) -> str | None:
    """The keys that lead to the first secret that is written out, with dots; None where there is none.

    A text is a secret by its key: `api_key`, `password`, and in a table of variables or headers any name that
    ends in key, token and the like. A text with a dollar names a variable.
    """
    pattern = _SECRET_IN_TABLE if in_table else _SECRET
    for name, value in arguments.items():
        if isinstance(value, dict):
            below = literal_secret(value, in_table=in_table or name in _TABLES)
            if below is not None:
                return f"{name}.{below}"
        elif isinstance(value, str) and value and "$" not in value and pattern.search(name):
            return name
    return None


def with_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Texts with the environment variables of this process that they name: $NAME, ${NAME}; $$ is a dollar.

    Raises:
        ConfigError: a variable is not set, or a dollar names none.
    """
    return {name: _with_variables(name, value) for name, value in values.items()}


def with_secrets(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a tool, with the environment variables that those with the key of a secret name.

    Raises:
        ConfigError: as of `with_variables`.
    """
    return {
        name: _with_variables(name, value) if isinstance(value, str) and _SECRET.search(name) else value
        for name, value in arguments.items()
    }


def _with_variables(name: str, value: str) -> str:
    try:
        return Template(value).substitute(os.environ)
    except KeyError as error:
        raise ConfigError(
            f"`{name}` names the environment variable {error.args[0]}, which is not set; export it."
        ) from None
    except ValueError:
        raise ConfigError(
            f"`{name}` has a dollar that names no environment variable; write $$ for a dollar."
        ) from None
