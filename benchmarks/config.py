"""Settings of the benchmarks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from agentrl.config import Section
from agentrl.types import JSON


def _split_at_commas(value: JSON) -> JSON:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_Seeds = Annotated[tuple[int, ...], BeforeValidator(_split_at_commas)]


class QuickstartBench(Section):
    """The runs and their scoring."""

    run_file: str = "examples/hop_search/run.toml"
    """Run file that is measured (TOML)."""
    seeds: _Seeds = (0, 1, 2, 3, 4)
    """Seeds, separated by commas."""
    split: str = "test"
    """Held-out split that is scored."""
    episodes: Annotated[int, Field(ge=1)] = 2048
    """Episodes of every score (count)."""
    controls: bool = True
    """Also run shuffled rewards, and the warm start continued without RL."""
    output_dir: str = "runs/bench"
    """Where the runs are cached; finished ones are not run again (folder)."""
    jobs: Annotated[int, Field(ge=1)] = 1
    """Runs at once, each on one core (count). Wall times are comparable only for 1 on an idle
    machine; CPU-seconds always are."""


AsyncPart = Literal["speedup", "table", "cheap", "long-tail", "wall"]
"""The parts of the benchmark of asynchronous training."""


class AsyncBench(Section):
    """The runs."""

    repeats: Annotated[int, Field(ge=1)] = 5
    """Runs of each side of speedup, cheap and long-tail, in turns (count)."""
    iterations: Annotated[int, Field(ge=8)] = 12
    """RL iterations of each of these runs (count); the first and the last few are not timed."""
    seeds: _Seeds = (0, 1, 2)
    """Seeds of table and wall, separated by commas."""
    staleness: _Seeds = (0, 1, 2, 4)
    """Values of max_staleness in the table (versions), separated by commas."""
    corrections: Annotated[tuple[str, ...], BeforeValidator(_split_at_commas)] = ("none", "tis", "icepop")
    """Corrections in the table, separated by commas; at max_staleness 0 only the first."""
    minutes: Annotated[float, Field(gt=0)] = 15.0
    """When table and wall start no further run (minutes each); the next call goes on with the rest."""
    output_dir: str = "runs/bench-async"
    """Where the runs of table and wall are cached; finished ones are not run again (folder)."""
