"""Secrets in the arguments of environments, tools and graders: environment variables by name, "$NAME".

The folder of a run holds these arguments as they were configured, in config.toml and report.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from string import Template
from typing import TypeVar, cast

from pydantic import AfterValidator

from agentrl.errors import ConfigError

_TABLES = ("env", "headers")
_SECRET = re.compile(
    r"(?:^|[_-])(?:password|passwd|secret|authorization|credentials)$"
    r"|(?:^|[_-])(?:api|access|auth|bearer|private|secret)[_-]?(?:key|token)s?$",
    re.IGNORECASE,
)
_SECRET_IN_TABLE = re.compile(
    r"(?:key|token|secret|password|passwd|pwd|authorization|credentials?|cookie)$", re.IGNORECASE
)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_ASSIGNMENT = re.compile(r"(?:--?)?([A-Za-z][\w.-]*)=.*", re.DOTALL)
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

OF_SERVERS = ("env", "headers", "args")
"""Arguments of a tool whose secrets are read when its server starts, not when the tool is made."""

T = TypeVar("T", bound=Mapping[str, object])


def by_reference(setting: str) -> AfterValidator:
    """The check of a setting that holds arguments: a secret in them is the name of an environment variable.

    The validator raises ValueError, with the place of the first one that is written out, never with its text.
    """

    def checked(arguments: T) -> T:
        if place := literal_secret(arguments):
            raise ValueError(
                f"{setting}.{place} is a secret, which config.toml and report.html would show; export it "
                'as an environment variable and write its name, "$NAME".'
            )
        return arguments

    return AfterValidator(checked)


def literal_secret(arguments: Mapping[str, object]) -> str | None:
    """The place of the first secret that is written out, with dots and indices; None where there is none.

    A text is a secret by its key: `api_key`, `password`; in a table of variables or headers, and after
    `--NAME` or in `NAME=...` in a list, any name that ends in key, token and the like. So is a URL with a
    password. A text that names a variable, $NAME, is not written out.
    """
    literals: list[str] = []

    def note(place: str, text: str) -> str:
        if text and not Template(text).get_identifiers():
            literals.append(place)
        return text

    _changed_items(arguments, note)
    return literals[0] if literals else None


def with_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Texts with the environment variables of this process that they name: $NAME, ${NAME}; $$ is a dollar.

    Raises:
        ConfigError: a variable is not set, or a dollar names none.
    """
    return {name: _with_variables(name, value) for name, value in values.items()}


def with_secrets(arguments: Mapping[str, object], *, but: Sequence[str] = ()) -> dict[str, object]:
    """The arguments, with the environment variables that their secrets name, see `literal_secret`.

    but: keys whose values are left as they are.

    Raises:
        ConfigError: as of `with_variables`.
    """
    resolved = {name: value for name, value in arguments.items() if name not in but}
    return {**arguments, **_changed_items(resolved, _with_variables)}


def with_options(items: Sequence[str]) -> list[str]:
    """A command line, with the environment variables that its secrets name, see `literal_secret`.

    Raises:
        ConfigError: as of `with_variables`.
    """
    return cast("list[str]", _changed(list(items), _with_variables, "args", "args"))


_Change = Callable[[str, str], str]


def _changed_items(arguments: Mapping[str, object], change: _Change) -> dict[str, object]:
    return {name: _changed(value, change, name, name) for name, value in arguments.items()}


def _changed(value: object, change: _Change, place: str, key: str, in_table: bool = False) -> object:
    """The value, with `change(place, text)` instead of each text that is a secret.

    key: the last name on the way to it. in_table: whether that names a variable, a header or an option.
    """
    if isinstance(value, dict):
        below = in_table or key in _TABLES
        return {name: _changed(item, change, f"{place}.{name}", name, below) for name, item in value.items()}
    if isinstance(value, list):
        options = [_option_of(value, index) for index in range(len(value))]
        return [
            _changed(item, change, f"{place}[{index}]", option or key, in_table or bool(option))
            for index, (item, option) in enumerate(zip(value, options, strict=True))
        ]
    is_secret = isinstance(value, str) and (
        (_SECRET_IN_TABLE if in_table else _SECRET).search(key) or _PASSWORD_IN_URL.search(value)
    )
    return change(place, value) if is_secret and isinstance(value, str) else value


def _option_of(items: Sequence[object], index: int) -> str:
    """The name of the option, or of the variable, whose value an item of a command line holds; "" = none."""
    item, previous = items[index], items[index - 1] if index else None
    if isinstance(item, str) and (assignment := _ASSIGNMENT.fullmatch(item)):
        return assignment[1]
    is_value = isinstance(item, str) and isinstance(previous, str) and not item.startswith("-")
    option = _OPTION.fullmatch(previous) if is_value and isinstance(previous, str) else None
    return "" if option is None else option[1]


def _with_variables(place: str, text: str) -> str:
    try:
        return Template(text).substitute(os.environ)
    except KeyError as error:
        raise ConfigError(
            f"`{place}` names the environment variable {error.args[0]}, which is not set; export it."
        ) from None
    except ValueError:
        raise ConfigError(
            f"`{place}` has a dollar that names no environment variable; write $$ for a dollar."
        ) from None
