"""Configuration of the prompts of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from agentrl.config import Section, Spelling, renamed
from agentrl.data.columns import Columns


def _read(value: object) -> object:
    """Validate the value of a config file or a flag; text is a path or JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is neither a path nor JSON ({error}).") from None
    if isinstance(value, dict):
        for path, weight in value.items():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"the weight of {path!r} is {weight!r}, not a number above 0.")
    if not (isinstance(value, str | dict | None) or _are_paths(value)):
        raise ValueError(f"{value!r} is no path, no list of paths and no table of path and weight.")
    return value


def _are_paths(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)


Paths = Annotated[str | tuple[str, ...] | dict[str, float] | None, BeforeValidator(_read)]
"""One path, several, or several with weights; as a flag a path, or JSON."""

PathList = Annotated[str | tuple[str, ...] | None, BeforeValidator(_read)]
"""One path, or several; as a flag a path, or JSON."""


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

    prompt_data: Paths = None
    """Prompts to play in place of the environment's own: a .jsonl, .json, .parquet or .arrow file or the
    folder of a dataset, `path@[0:100]` = some of its rows; several as a list, or as a table of path and
    weight (as a flag: JSON)."""


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
