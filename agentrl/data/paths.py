"""Paths of prompts, as settings have them: one, several, or several with weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator


def parsed(value: object) -> object:
    """The value of a config file or a flag; text is a path or JSON.

    Raises:
        ValueError: text that begins like JSON is none.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is neither a path nor JSON ({error}).") from None
    return value


def read_paths(value: object) -> object:
    """Validate paths of prompts.

    Raises:
        ValueError: it is none of their forms.
    """
    value = parsed(value)
    if isinstance(value, dict):
        for path, weight in value.items():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"the weight of {path!r} is {weight!r}, not a number above 0.")
    if not (isinstance(value, str | dict | None) or _are_paths(value)):
        raise ValueError(f"{value!r} is no path, no list of paths and no table of path and weight.")
    return value


def _are_paths(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)


Paths = Annotated[str | tuple[str, ...] | dict[str, float] | None, BeforeValidator(read_paths)]
"""One path, several, or several with weights; as a flag a path, or JSON."""

PathList = Annotated[str | tuple[str, ...] | None, BeforeValidator(read_paths)]
"""One path, or several; as a flag a path, or JSON."""


def weights_of(paths: str | tuple[str, ...] | dict[str, float]) -> Mapping[str, float]:
    """Every path with its weight, which is 1 by default."""
    if isinstance(paths, dict):
        return paths
    return dict.fromkeys((paths,) if isinstance(paths, str) else paths, 1.0)


def paths_of(paths: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The paths of a setting; empty where it was left out."""
    return (paths,) if isinstance(paths, str) else paths or ()
