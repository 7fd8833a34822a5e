"""The environment: tools over a sheet, and what is left of it under other inputs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal, cast

from agentrl import Limits, Message, Script, Task, ToolRejected, call, say, tool
from agentrl.tools import JSON, inline
from envs_contrib.seeded import SeededWorld, is_number
from envs_contrib.spreadsheet import tables
from envs_contrib.spreadsheet.formulas import MOST_CHARS, FormulaError, cells_of, shown, values

_MOST_FOUND = 20
_CARELESS = 0.25
"""Demonstrations that write numbers instead of formulas."""


class Spreadsheet(SeededWorld):
    """Formulas of a sheet have to be mended or filled in, and questions about it answered.

    What was written is computed again with other numbers in the table: a number in place of a formula, or a
    formula that leaves out a row, is worth nothing, and so is a change of anything else outside of column J.
    Formulas have SUM, AVERAGE, MIN, MAX, COUNT and IF. Level 1 has four rows; level 2 has eight, and amounts
    with a condition; level 3 has fourteen, faults in a row, running sums, and averages to compare.

    seed: of all tasks; no task of one split is in another, whatever the seeds. level: 1, 2, 3; None = all.

    Raises:
        UserError: there is no such level.
    """

    limits = Limits(max_turns=12, max_tokens=8192)
    draw = staticmethod(tables.draw)
    _cells: dict[str, str]

    @tool(inline=True)
    def read_range(self, range: str, show: Literal["values", "formulas"] = "values") -> str:
        """Read the cells of a range.

        Args:
            range: such as A1:E9, or one cell
            show: the values, or the formulas as they are written
        """
        cells = _range(range)
        computed = values(self._cells) if show == "values" else {}
        rows: dict[str, list[str]] = {}
        for cell in cells:
            text = shown(computed[cell]) if cell in computed else self._cells.get(cell, "")
            rows.setdefault(cell[1:], []).append(text)
        columns = dict.fromkeys(cell[0] for cell in cells)
        lines = [" | ".join(["", *columns]), *(" | ".join([row, *texts]) for row, texts in rows.items())]
        return "\n".join(lines).strip()

    @tool(inline=True)
    def write_cells(self, cells: dict[str, str]) -> str:
        """Write into cells; a formula begins with =, and an empty text clears a cell.

        Args:
            cells: by cell, such as B2, its new content
        """
        for cell, text in cells.items():
            if len(_range(cell)) > 1 or len(text) > MOST_CHARS:
                raise ToolRejected(f"write into single cells, at most {MOST_CHARS} characters each.")
        new = {_range(cell)[0]: text.strip() for cell, text in cells.items()}
        self._cells = {cell: text for cell, text in {**self._cells, **new}.items() if text}
        computed = values(self._cells)
        return "\n".join(f"{cell} is {shown(computed.get(cell)) or 'empty'}" for cell in new)

    @tool(inline=True)
    def find(self, text: str) -> str:
        """Find the cells that contain a text.

        Args:
            text: in any case, at least one character
        """
        wanted = text.strip().lower()
        found = [f"{cell}: {content}" for cell, content in self._cells.items() if wanted in content.lower()]
        if not wanted or not found:
            return "no cell has this text"
        return "\n".join(found[:_MOST_FOUND])

    tools = (read_range, write_cells, find)

    @inline
    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Open the task's sheet."""
        self._cells = _texts(task, "start")
        return await super().reset(task, seed=seed)

    def reward(self, task: Task, answer: str) -> float:
        """1.0 where the sheet is right under all inputs, and the answer to a question is."""
        result = task.metadata.get("result")
        if result is not None and not is_number(answer, str(result)):
            return 0.0
        return float(tables.worth(_texts(task, "start"), self._cells, _texts(task, "targets"), task.id))

    @inline
    def save_state(self) -> Mapping[str, JSON]:
        """The sheet."""
        return {"_cells": dict(self._cells)}

    def expert(self, task: Task) -> Script:
        """Read, write the right formulas; or look up or calculate what is asked for, and say it."""
        kind, level = task.metadata["kind"], task.metadata["level"]
        if kind != "ask":
            yield call("read_range", range="A1:H15", show="formulas")
            yield call("write_cells", cells=task.metadata["targets"])
            yield say("done")
        elif level == 1:
            place = yield call("find", text=task.metadata["look_up"])
            row = place.partition(":")[0][1:]
            yield from _said((yield call("read_range", range=f"E{row}")))
        else:
            yield call("read_range", range="A1:H15")
            yield call("write_cells", cells=task.metadata["scratch"])
            yield from _said((yield call("read_range", range="J1")))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert, who writes numbers in place of formulas now and then."""
        if task.metadata["kind"] == "ask" or rng.random() >= _CARELESS:
            yield from self.expert(task)
            return
        targets = _texts(task, "targets")
        computed = values({**_texts(task, "start"), **targets})
        yield call("read_range", range="A1:H15")
        yield call("write_cells", cells={cell: shown(computed[cell]) for cell in targets})
        yield say("done")


def _said(table: str) -> Script:
    """The one number of a table that was read."""
    yield say(f"{float(table.rpartition(' | ')[2]):.2f}")


def _range(text: str) -> list[str]:
    try:
        return cells_of(text)
    except FormulaError:
        raise ToolRejected("there are no such cells; the sheet has A1 to J40.") from None


def _texts(task: Task, name: str) -> dict[str, str]:
    return dict(cast(Mapping[str, str], task.metadata[name]))
