"""Which prompts a run plays, as configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from agentrl.config import Section, Spelling, renamed
from agentrl.data.columns import Columns


def _read(value: object) -> object:
    """What a file or a flag says, whose text is a path or JSON."""
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


def weights_of(paths: str | tuple[str, ...] | dict[str, float]) -> Mapping[str, float]:
    """Every path with its weight; those that have none weigh 1."""
    if isinstance(paths, dict):
        return paths
    return dict.fromkeys((paths,) if isinstance(paths, str) else paths, 1.0)


class ColumnChoice(Section):
    """How rows of files are read."""

    input_key: str = "input"
    """Column of the prompt: a string, which the user says, or a list of messages; a dot leads into an
    object."""
    label_key: str | None = None
    """Column of the answer, which rewards compare with; left out, tasks have none."""
    metadata_key: str | None = None
    """Column of an object that the environment sees as the task's metadata; left out, it is empty."""
    tool_key: str | None = None
    """Column of a list of tool schemas that belong to the prompt; kept in the metadata as `tools`."""

    spellings: ClassVar[Mapping[str, Spelling]] = {"prompt_key": renamed("input_key")}

    @property
    def columns(self) -> Columns:
        """The same, as sources take them."""
        return Columns(self.input_key, self.label_key, self.metadata_key, self.tool_key)


class DataChoice(ColumnChoice):
    """Prompts from files, and how their rows are read."""

    prompt_data: Paths = None
    """Prompts to play in place of the environment's own: a .jsonl, .json, .parquet or .arrow file or the
    folder of a dataset, `path@[0:100]` = some of its rows; several as a list, or as a table of path and
    weight (as a flag: JSON)."""


COLUMNS = tuple(ColumnChoice.model_fields)
"""The settings that say how rows are read."""


class DataConfig(DataChoice):
    """Which prompts RL plays, and in what order."""

    rollout_max_prompt_len: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a prompt; a longer one is skipped and counted (tokens); left out, any."""
    rollout_shuffle: bool = True
    """Draw the order of prompts in each epoch, by the seed; else they come as they stand."""
    data_source_path: str | None = None
    """A source of prompts of your own (package.module:name), called with `seed=`; see agentrl.data.DataSource
    for what it has to be."""

    @property
    def gives_prompts(self) -> bool:
        """Whether prompts come from here, rather than from the environment."""
        return self.prompt_data is not None or self.data_source_path is not None
