"""Two benchmarks, or two policies of one, next to each other: paired differences over their common tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich import box
from rich.table import Table
from rich.text import Text

from agentrl.errors import ConfigError, did_you_mean
from agentrl.evaluation.benchmark.report import Benchmark, estimate_text
from agentrl.evaluation.benchmark.results import CellResult, as_json
from agentrl.evaluation.statistics import Estimate, differences_of, paired_difference
from agentrl.types import JSON
from agentrl.view.scores import score_text
from agentrl.view.transcript import visible


@dataclass(frozen=True, slots=True)
class Side:
    """The finished cells of one side, by the names of row and policy. policy: None = every policy."""

    name: str
    policy: str | None
    cells: Mapping[tuple[str, str], CellResult]

    @classmethod
    def read(cls, text: str) -> Side:
        """The side of FOLDER, or of one policy of it, FOLDER:POLICY.

        Raises:
            ConfigError: there is no benchmark, it has no such policy, or a result is broken.
        """
        folder, policy = Path(text), None
        if not folder.is_dir():
            head, colon, tail = text.partition(":")
            folder, policy = Path(head), tail if colon else None
        benchmark = Benchmark.read(folder)
        policies = sorted({str(row["policy"]) for row in benchmark.rows})
        if policy is not None and policy not in policies:
            raise ConfigError(
                f"{folder} has no policy `{policy}`.{did_you_mean(policy, policies)} "
                f"It has {', '.join(policies)}."
            )
        rows = [row for row in benchmark.rows if row["state"] == "done" and policy in (None, row["policy"])]
        results = [CellResult.read(folder / str(row["folder"])) for row in rows]
        cells = {(result.env, result.policy): result for result in results if result is not None}
        return cls(text, policy, cells)


@dataclass(frozen=True, slots=True)
class PairedRow:
    """One environment: both sides on the tasks that both have played.

    better, worse: tasks on which the second has the higher, or the lower, mean score (count). same_code,
    same_settings: whether both were played with the same code and settings of the environment.
    """

    env: str
    first: str
    second: str
    tasks: int
    only_first: int
    only_second: int
    first_mean: float | None
    second_mean: float | None
    difference: Estimate | None
    better: int
    worse: int
    same_code: bool
    same_settings: bool

    @classmethod
    def of(cls, first: CellResult, second: CellResult) -> PairedRow:
        """The comparison of two cells of one environment."""
        one, other = first.by_task, second.by_task
        differences = differences_of(one, other)
        return cls(
            env=first.env,
            first=first.policy,
            second=second.policy,
            tasks=len(differences),
            only_first=len(one.keys() - differences.keys()),
            only_second=len(other.keys() - differences.keys()),
            first_mean=fmean(fmean(one[task]) for task in differences) if differences else None,
            second_mean=fmean(fmean(other[task]) for task in differences) if differences else None,
            difference=paired_difference(one, other),
            better=sum(value > 0 for value in differences.values()),
            worse=sum(value < 0 for value in differences.values()),
            same_code=first.identity["code"] == second.identity["code"],
            same_settings=first.identity["settings"] == second.identity["settings"],
        )

    @property
    def note(self) -> str:
        """What weakens the comparison; empty where nothing does."""
        reasons = [
            ("no common task", not self.tasks),
            ("other code of the environment", not self.same_code),
            ("other settings", not self.same_settings),
        ]
        return ", ".join(text for text, holds in reasons if holds)

    def as_json(self) -> dict[str, JSON]:
        """Plain values, in the order of the fields."""
        values: dict[str, JSON] = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "difference": as_json(self.difference)}


@dataclass(frozen=True, slots=True)
class BenchmarkComparison:
    """The common environments of two sides, each with the paired difference second - first."""

    first: Side
    second: Side
    rows: tuple[PairedRow, ...]

    @classmethod
    def of(cls, first: Side, second: Side) -> BenchmarkComparison:
        """Compare environment by environment; where a side has several policies, those of one name.

        Raises:
            ConfigError: no finished cell of one side has a counterpart in the other.
        """
        rows = tuple(PairedRow.of(*pair) for pair in _pairs(first, second))
        if not rows:
            raise ConfigError(
                f"{first.name} and {second.name} have no finished environment and policy in common; name one "
                "policy of each, FOLDER:POLICY."
            )
        return cls(first, second, rows)

    def as_json(self) -> dict[str, JSON]:
        """The comparison as one object."""
        rows: list[JSON] = [row.as_json() for row in self.rows]
        return {"first": self.first.name, "second": self.second.name, "rows": rows}

    def table(self) -> Table:
        """The comparison for a terminal."""
        caption = (
            "difference: second - first, with its 95% interval (bootstrap over common tasks, or Wilson's)"
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=Text(caption), caption_justify="left")
        table.add_column("environment", overflow="fold")
        for name in ("first", "second", "tasks", "mean", "mean", "difference", "better", "worse"):
            table.add_column(name, justify="right", overflow="fold")
        table.add_column("")
        for row in self.rows:
            cells = [
                *(row.env, row.first, row.second, str(row.tasks)),
                *(score_text(row.first_mean), score_text(row.second_mean)),
                *(estimate_text(as_json(row.difference)), str(row.better), str(row.worse), row.note),
            ]
            table.add_row(*(Text(visible(cell)) for cell in cells))
        return table


def _pairs(first: Side, second: Side) -> Iterator[tuple[CellResult, CellResult]]:
    """Cells of one environment: of the one policy that each side names, else of one name."""
    by_policy = [{policy for _, policy in side.cells} for side in (first, second)]
    is_free = all(len(policies) == 1 for policies in by_policy)
    for (env, policy), cell in first.cells.items():
        for (other_env, other_policy), other in second.cells.items():
            if env == other_env and (is_free or policy == other_policy):
                yield cell, other
