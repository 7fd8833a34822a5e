"""`agentrl bench`."""

from __future__ import annotations

import json

import rich_click as click

from agentrl.types import JSON


@click.group()
def bench() -> None:
    """Benchmarks: each compares side by side in one run and prints JSON."""


@bench.command("quickstart")
@click.option(
    "--run-file",
    default="examples/hop_search/run.toml",
    show_default=True,
    help="Run that is measured (TOML).",
)
@click.option("--seeds", default="0,1,2,3,4", show_default=True, help="Seeds, separated by commas.")
@click.option("--split", default="test", show_default=True, help="Held-out split that is scored.")
@click.option("--episodes", default=2048, show_default=True, type=click.IntRange(1), help="Episodes a score.")
@click.option("--controls/--no-controls", default=True, help="Also run shuffled rewards and warm start only.")
@click.option("--output-dir", default="runs/bench", show_default=True, help="Where the runs are kept.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Runs at once.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def quickstart_command(
    run_file: str,
    seeds: str,
    split: str,
    episodes: int,
    controls: bool,
    output_dir: str,
    jobs: int,
    as_json: bool,
) -> None:
    """How well the agent of RUN_FILE learns: over seeds, on held-out tasks, against two controls.

    Finished runs are kept and not run again: remove --output-dir to start over.
    """
    from agentrl.bench.quickstart import bench_quickstart

    result = bench_quickstart(
        run_file,
        seeds=[int(seed) for seed in seeds.split(",")],
        split=split,
        episodes=episodes,
        controls=controls,
        output_dir=output_dir,
        jobs=jobs,
    )
    _print(result, as_json, "summary")


@bench.command("engine")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def engine_command(as_json: bool) -> None:
    """The embedded engine against transformers' generate: tokens a second, side by side."""
    from agentrl.bench.engine import bench_engine

    _print(bench_engine(), as_json, "summary")


def _print(result: dict[str, JSON], as_json: bool, short: str) -> None:
    click.echo(json.dumps(result) if as_json else json.dumps(result[short], indent=2))
