"""Configuration of the prompts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from agentrl.config import Changes, NameOrPath, Section, Spelling, renamed
from agentrl.data.columns import Columns
from agentrl.data.eval_config import in_file_as
from agentrl.data.eval_sets import EvalPaths, sets_of
from agentrl.data.paths import Paths


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
    each with a report of its own: a table of name and path (as flags: --eval-prompt-data NAME PATH ...), or
    of name and the settings of that set, `path` among them."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        **ColumnChoice.spellings,
        "eval_prompt_data": renamed("prompt_data"),
        "eval_config": in_file_as("prompt_data"),
    }

    @model_validator(mode="after")
    def _only_runs_have_intervals(self) -> EvalData:
        sets = {} if self.prompt_data is None else sets_of(self.prompt_data)
        timed = [name for name, own in sets.items() if own.interval is not None]
        if timed:
            raise ValueError(
                f"the set {timed[0]!r} has an interval, which only evaluations of a training run have; leave "
                "it out."
            )
        return self


COLUMNS = tuple(ColumnChoice.model_fields)
"""The settings of the columns."""


class DataConfig(DataChoice):
    """The prompts of RL, and their order."""

    rollout_max_prompt_len: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a prompt; a longer one is skipped and counted (tokens); left out, any."""
    rollout_shuffle: bool = True
    """Shuffle the prompts of each epoch, by the seed; else they keep the order of the file."""
    data_source_path: NameOrPath | None = None
    """A custom source of prompts (package.module:name), called with `seed=`; agentrl.data.DataSource
    documents its contract."""

    @property
    def gives_prompts(self) -> bool:
        """Whether this section configures prompts, in place of those of the environment."""
        return self.prompt_data is not None or self.data_source_path is not None
