"""`agentrl envs check`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentrl.cli.commands import Command
from agentrl.cli.flags import read_json_object
from agentrl.envs.check import CheckReport, Severity, check_env
from agentrl.view.scores import time_text

FAILED = 1
LONG_S = 5.0
"""After that a check without a terminal says what it does (seconds)."""
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow"}


env_kwargs_option = click.option(
    "--env-kwargs",
    default="{}",
    metavar="JSON",
    help="Arguments of the environment's constructor (a JSON object) [default: {}]",
)


@click.command("check", cls=Command)
@click.argument("env_id")
@env_kwargs_option
@click.option(
    "--n", default=32, show_default=True, help="Tasks that the expert and random play are measured on."
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices of the check.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def check_command(env_id: str, env_kwargs: str, n: int, seed: int, as_json: bool) -> None:
    """Check whether an environment is worth training on.

    The expert must reach its score; silence, chance and cheats must not. Leaving an episode must not pay more
    than losing it. Exit code 1: there are errors.
    """
    check = partial(
        check_env, env_id, env_kwargs=read_json_object("--env-kwargs", env_kwargs), n=n, seed=seed
    )
    if as_json:
        report = check()
        click.echo(json.dumps(report.to_json()))
    else:
        with _shown(Console(stderr=True)) as shown:
            report = check(progress=shown)
        _show(report, Console())
    if not report.ok:
        sys.exit(FAILED)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows which probe runs, and for how long: in a line of a terminal, else in lines once it takes long."""
    columns = (SpinnerColumn(), TextColumn("checking: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, begun_s = bar.add_task("", total=None), time.monotonic()

        def show(what: str) -> None:
            bar.update(task, description=what)
            elapsed_s = time.monotonic() - begun_s
            if not console.is_terminal and elapsed_s >= LONG_S:
                click.echo(f"checking: {what} (after {time_text(elapsed_s)})", err=True)

        yield show


def _show(report: CheckReport, console: Console) -> None:
    figures = Table(title=report.env_id, show_header=False)
    for name, value in report.figures.items():
        figures.add_row(name, f"{value:.4g}")
    console.print(figures)
    for finding in report.findings:
        style = _STYLES[finding.severity]
        console.print(
            f"[{style}]{finding.severity}[/] {finding.code}: {escape(finding.text)}", highlight=False
        )
    errors = _counted(len(report.errors), "error")
    warnings = _counted(len(report.findings) - len(report.errors), "warning")
    verdict = "passed" if report.ok else "failed"
    console.print(f"{report.env_id} {verdict}: {errors}, {warnings}.", highlight=False)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
