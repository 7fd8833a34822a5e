"""`agentrl benchmark`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import rich_click as click
from rich.console import Console

from agentrl.assembly.trust import read_trusted
from agentrl.cli.commands import CommandGroup
from agentrl.cli.flags import EngineFlags, config_flags, flag_values, read_json_object
from agentrl.config import read_toml
from agentrl.errors import ConfigError
from agentrl.evaluation.benchmark.suite import NO_SETTINGS, SUITE, Suite, SuiteFile, envs_of, with_flags
from agentrl.evaluation.config import EvalConfig
from agentrl.runtime.ownership import check_own
from agentrl.types import JSON

INCOMPLETE = 1
_RUN = "run"


class DefaultGroup(CommandGroup):
    """A group whose command `run` needs no name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name, else `run`."""
        return super().resolve_command(ctx, args if args[0] in self.commands else [_RUN, *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave flags, --help included, to `run`, unless a command is named first."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else [_RUN, *args])


@click.group("benchmark", cls=DefaultGroup)
def benchmark() -> None:
    """Score many policies on many environments; compare benchmarks."""


@config_flags(EvalConfig, without=NO_SETTINGS)
@benchmark.command(_RUN, cls=EngineFlags)
@click.argument("suite", required=False)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    help="Policy to score: a Hugging Face directory, NAME@URL of a chat endpoint, expert, null or random; "
    "NAME=MODEL names its rows. Once for each.",
)
@click.option(
    "--prices",
    metavar="JSON|FILE",
    help='Prices of a million tokens by model, {"NAME": {"prompt": 0.1, "completion": 0.4, "cached": 0.02}}, '
    "or a TOML file of such tables.",
)
@click.option("--output-dir", default="runs/benchmark", show_default=True, help="Folder of the benchmark.")
@click.option("--resume", is_flag=True, help="Go on with the benchmark in the folder SUITE.")
@click.option("--retry-failed", is_flag=True, help="Play failed episodes of finished cells again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def run_command(
    suite: str | None,
    models: tuple[str, ...],
    prices: str | None,
    output_dir: str,
    resume: bool,
    as_json: bool,
    **flags: str | bool | None,
) -> None:
    """Score every --model on every environment of SUITE, and print one table.

    SUITE is ids with commas between them, where * stands for any characters, or a TOML file with settings for
    each environment:

        agentrl benchmark 'HopSearch-v0,ReasoningGym-*' --model runs/quickstart/checkpoint --model random

    Every other flag is a setting of `agentrl eval`, for all cells. Each cell (an environment and a policy)
    has its mean and pass@k with 95% intervals, turns, tokens, cost, violations, and failures by kind. A
    failed episode is in no mean. With --break-tool a second table has what tools earn. Where an environment
    cannot be built, or a model cannot be opened, its rows have the reason, and the others are played.

    Interrupted or killed, it goes on with the same command, or with `agentrl benchmark FOLDER --resume`: what
    has ended is not played again, unless the settings, the environment's code, the data or the model changed.

    Writes <output_dir>/: benchmark.json, benchmark.html, suite.toml, and every episode (cells/).
    `agentrl benchmark compare A B` compares two of them, task by task.

    Exit code 0: every cell has a score. 1: one has none; the table holds the reason. 2: bad input.
    """
    from agentrl.evaluation.benchmark.run import run_benchmark
    from agentrl.view.console import RunConsole

    file, folder = _suite_file(suite, Path(output_dir), resume=resume)
    retry_failed = bool(flags.pop("retry_failed"))
    override = flag_values(flags, EvalConfig)
    tables = with_flags(file, models=models, prices=_prices(prices), override=override)
    played = run_benchmark(Suite.of(tables), folder, RunConsole(quiet=as_json), retry_failed=retry_failed)
    if as_json:
        click.echo(json.dumps(played.as_json()))
    else:
        console = Console()
        console.print(*filter(None, (played.table(), played.tools_table())), sep="\n")
        for line in played.notes():
            console.print(line, markup=False, highlight=False)
        console.print(f"Page: {folder / 'benchmark.html'}", markup=False, highlight=False)
        console.print(f"All episodes: agentrl view {folder}", markup=False, highlight=False)
    if not played.is_complete:
        sys.exit(INCOMPLETE)


@benchmark.command("compare")
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def compare_command(first: str, second: str, as_json: bool) -> None:
    """Compare two benchmarks, or two policies of one: paired differences over common tasks.

    FIRST and SECOND are folders of benchmarks, or FOLDER:POLICY for one policy of it:

        agentrl benchmark compare runs/benchmark:random runs/benchmark:expert

    A difference is second - first, the mean over common tasks; its interval is a bootstrap over these. Where
    it excludes 0, the two differ on such tasks beyond chance. Where folders have several policies, those of
    one name are compared.
    """
    from agentrl.evaluation.benchmark.compare import BenchmarkComparison, Side

    comparison = BenchmarkComparison.of(Side.read(first), Side.read(second))
    if as_json:
        click.echo(json.dumps(comparison.as_json()))
    else:
        Console().print(comparison.table())


def _suite_file(suite: str | None, folder: Path, *, resume: bool) -> tuple[SuiteFile, Path]:
    """The tables of a suite, and the folder of its benchmark.

    A list of ids may be longer than the name of a file, which `os.path.isdir` accepts.

    Raises:
        ConfigError: nothing is named, or the folder of `--resume` holds no benchmark.
    """
    if resume and (suite is None or os.path.isdir(suite)):
        folder = folder if suite is None else Path(suite)
        if not (folder / SUITE).exists():
            raise ConfigError(f"{folder} holds no benchmark that could go on; name the folder of one.")
        check_own(folder)
        return SuiteFile.of(read_trusted(folder / SUITE), folder / SUITE), folder
    if suite is None or os.path.isdir(suite):
        raise ConfigError(
            "name environments with commas between them, such as 'HopSearch-v0,ToyText-*', or a suite's TOML "
            "file; a folder goes on with --resume."
        )
    if suite.endswith(".toml"):
        return SuiteFile.of(read_toml(Path(suite)), Path(suite)), folder
    return SuiteFile(env=envs_of(suite)), folder


def _prices(text: str | None) -> Mapping[str, JSON] | None:
    if text is None:
        return None
    return read_json_object("--prices", text) if text.lstrip().startswith("{") else read_toml(Path(text))
