"""Conversion of rows to tasks, by the names of their columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from agentrl.data.messages import prompt_of, tools_of
from agentrl.data.rows.base import Row
from agentrl.errors import DataError, did_you_mean
from agentrl.types import JSON, Observation, Task

ANSWERS, TOOLS = "answers", "tools"
"""Keys of Task.metadata: the list of answers where there are several, and the tools of the row."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns; None = not read.

    A dotted name selects a field of an object: `reward_model.ground_truth`.
    """

    input: str = "input"
    label: str | None = None
    metadata: str | None = None
    tools: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        return tuple(name for name in (self.input, self.label, self.metadata, self.tools) if name is not None)

    def task(self, row: Row, *, id: str, split: str, where: str) -> Task:
        """The task of a row.

        Raises:
            DataError: a column is missing or has a value of another type; the message begins with `where`.
        """
        metadata = self._metadata(row, where)
        answer = None
        if self.label is not None:
            label = _without_nulls(column_value(row, self.label, where, "label_key"))
            answer = _answer(label)
            if _are_texts(label):
                metadata[ANSWERS] = label
        if self.tools is not None:
            metadata[TOOLS] = self._tools(row, self.tools, where)
        return Task(id, self._prompt(row, where), answer, metadata, split)

    def _prompt(self, row: Row, where: str) -> Observation:
        value = column_value(row, self.input, where, "input_key")
        try:
            return prompt_of(value)
        except ValueError as error:
            raise DataError(f"{where}: `{self.input}` {error}.") from None

    def _metadata(self, row: Row, where: str) -> dict[str, JSON]:
        if self.metadata is None:
            return {}
        metadata = column_value(row, self.metadata, where, "metadata_key")
        if isinstance(metadata, str):
            try:
                metadata = json.loads(metadata)
            except ValueError:
                metadata = ""
        if not isinstance(metadata, dict | None):
            raise DataError(
                f"{where}: `{self.metadata}` is no object; metadata_key names a column of objects."
            )
        return dict(metadata or {})

    def _tools(self, row: Row, name: str, where: str) -> list[JSON]:
        schemas = column_value(row, name, where, "tool_key")
        try:
            return [] if schemas is None else list(tools_of(schemas))
        except ValueError as error:
            raise DataError(f"{where}: `{name}` {error}.") from None


def column_value(row: Row, name: str, where: str, setting: str) -> JSON:
    """The value of a column in a row. where, setting: the row and the config key, for the error message.

    Raises:
        DataError: the row has no such column.
    """
    if name in row:
        return row[name]
    value: JSON = dict(row)
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = did_you_mean(name, row)
            columns = ", ".join(f"`{column}`" for column in row) or "nothing"
            raise DataError(
                f"{where}: there is no `{name}`.{near} It has {columns}: name one with {setting}."
            )
        value = value[part]
    return value


def _without_nulls(label: JSON) -> JSON:
    """A label without what stands for a missing value: null, the NaN of a Parquet column, a list of these."""
    if isinstance(label, list):
        return [item for item in label if _without_nulls(item) is not None] or None
    return None if isinstance(label, float) and math.isnan(label) else label


def _answer(label: JSON) -> str | None:
    """A label as text: a string unchanged, the first of a list of strings, any other value as JSON, but its
    numbers as they are written by hand."""
    if isinstance(label, list) and _are_texts(label):
        return str(label[0])
    if isinstance(label, list) and all(isinstance(item, float | int) for item in label):
        return f"[{', '.join(str(_answer(item)) for item in label)}]"
    if isinstance(label, float) and math.isfinite(label):
        return _decimal(label)
    return label if isinstance(label, str | None) else json.dumps(label, ensure_ascii=False)


def _decimal(number: float) -> str:
    """The shortest decimal that is read as this number, without an exponent, and without the `.0` of a whole
    number: a column of integers with a null is one of floats."""
    text = f"{Decimal(repr(number)):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _are_texts(label: JSON) -> bool:
    return isinstance(label, list) and bool(label) and all(isinstance(text, str) for text in label)
