"""Configuration of the prompts of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from agentrl.config import Changes, Section, Spelling, renamed
from agentrl.data.columns import Columns

_SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_NO_SET_NAMES = ("sampled", "greedy", "loss")


def _parsed(value: object) -> object:
    """The value of a config file or a flag; text is a path or JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is neither a path nor JSON ({error}).") from None
    return value


def _read(value: object) -> object:
    """Validate paths of prompts."""
    value = _parsed(value)
    if isinstance(value, dict):
        for path, weight in value.items():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"the weight of {path!r} is {weight!r}, not a number above 0.")
    if not (isinstance(value, str | dict | None) or _are_paths(value)):
        raise ValueError(f"{value!r} is no path, no list of paths and no table of path and weight.")
    return value


def _are_paths(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)


def _read_sets(value: object) -> object:
    """Validate held-out prompts: a path for each name, or paths as `_read` accepts them."""
    value = _parsed(value)
    if not (isinstance(value, dict) and any(isinstance(path, str) for path in value.values())):
        return _read(value)
    for name, path in value.items():
        if not isinstance(path, str):
            raise ValueError(
                f"{name!r} has no path but {path!r}; give every set a path, or every path a weight."
            )
        if not _SET_NAME.fullmatch(name) or name in _NO_SET_NAMES:
            raise ValueError(
                f"a set of prompts cannot be called {name!r}; use letters, digits, `.`, `_` and `-`, and "
                f"none of the names {', '.join(_NO_SET_NAMES)}."
            )
    # Their journals are files whose names have `-` for both.
    if len({name.replace("_", "-") for name in value}) < len(value):
        raise ValueError(f"two of the sets {', '.join(value)} differ only in `-` and `_`; rename one.")
    return value


Paths = Annotated[str | tuple[str, ...] | dict[str, float] | None, BeforeValidator(_read)]
"""One path, several, or several with weights; as a flag a path, or JSON."""

PathList = Annotated[str | tuple[str, ...] | None, BeforeValidator(_read)]
"""One path, or several; as a flag a path, or JSON."""

EvalPaths = Annotated[
    str | tuple[str, ...] | dict[str, str] | dict[str, float] | None, BeforeValidator(_read_sets)
]
"""Paths, or sets of prompts: a table of name and path; as a flag NAME PATH [NAME PATH ...], or JSON."""


def sets_of(
    paths: str | tuple[str, ...] | dict[str, str] | dict[str, float],
) -> dict[str, str | tuple[str, ...] | dict[str, float]]:
    """The paths of each set of prompts by its name; of a single set without a name, under ""."""
    if not isinstance(paths, dict):
        return {"": paths}
    named: dict[str, str | tuple[str, ...] | dict[str, float]] = {}
    weights: dict[str, float] = {}
    for name, item in paths.items():
        if isinstance(item, str):
            named[name] = item
        else:
            weights[name] = item
    return named or {"": weights}


def weights_of(paths: str | tuple[str, ...] | dict[str, float]) -> Mapping[str, float]:
    """Every path with its weight, which is 1 by default."""
    if isinstance(paths, dict):
        return paths
    return dict.fromkeys((paths,) if isinstance(paths, str) else paths, 1.0)


class ColumnChoice(Section):
    """The columns of the files' rows."""

    input_key: str = "input"
    """Column of the prompt: a string (the message of the user), or a list of messages; a dotted name
    selects a field of an object."""
    label_key: str | None = None
    """Column of the answer, for rewards; left out, tasks have no answer."""
    metadata_key: str | None = None
    """Column of an object, the task's metadata for the environment; left out, the metadata is empty."""
    tool_key: str | None = None
    """Column of a list of tool schemas that belong to the prompt; stored in the metadata as `tools`."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"prompt_key": renamed("input_key")}

    @property
    def columns(self) -> Columns:
        """The columns as an argument of sources."""
        return Columns(self.input_key, self.label_key, self.metadata_key, self.tool_key)


class DataChoice(ColumnChoice):
    """Files of prompts, and the columns of their rows."""

    prompt_data: Annotated[Paths, Changes.COURSE] = None
    """Prompts to play in place of the environment's own: a .jsonl, .json, .csv, .tsv (or one of these under
    gzip, .jsonl.gz), .parquet or .arrow file or the folder of a dataset, `path@[0:100]` = some of its rows;
    several as a list, or as a table of path and weight (as a flag: JSON)."""


class EvalData(ColumnChoice):
    """The prompts of an eval-only run, and the columns of their rows."""

    prompt_data: Annotated[EvalPaths, Changes.COURSE] = None
    """Prompts to play in place of the environment's own, in the form of a run's prompt_data; or several sets,
    each with a report of its own: a table of name and path (as flags: --eval-prompt-data NAME PATH ...)."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        **ColumnChoice.spellings,
        "eval_prompt_data": renamed("prompt_data"),
    }


def paths_of(paths: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The paths of a setting; empty where it was left out."""
    return (paths,) if isinstance(paths, str) else paths or ()


COLUMNS = tuple(ColumnChoice.model_fields)
"""The settings of the columns."""


class DataConfig(DataChoice):
    """The prompts of RL, and their order."""

    rollout_max_prompt_len: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a prompt; a longer one is skipped and counted (tokens); left out, any."""
    rollout_shuffle: bool = True
    """Shuffle the prompts of each epoch, by the seed; else they keep the order of the file."""
    data_source_path: str | None = None
    """A custom source of prompts (package.module:name), called with `seed=`; agentrl.data.DataSource
    documents its contract."""

    @property
    def gives_prompts(self) -> bool:
        """Whether this section configures prompts, in place of those of the environment."""
        return self.prompt_data is not None or self.data_source_path is not None
