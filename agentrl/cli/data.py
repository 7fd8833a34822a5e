"""`agentrl data`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import rich_click as click
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from agentrl.assembly.rewards import misfits_of_rows
from agentrl.cli.commands import CommandGroup
from agentrl.cli.flags import config_flags, flag_values
from agentrl.config import Section, by_section, parse
from agentrl.data.config import ColumnChoice
from agentrl.data.report import CHARACTERS, DataReport, Measure, report_on
from agentrl.runtime.extras import TRAINING, require
from agentrl.runtime.interrupts import run_until_signal
from agentrl.tools.secrets import by_reference
from agentrl.types import JSON

BAD_DATA = 2


class _Grader(Section):
    """The grader of the answers."""

    reward: str | None = None
    """Grader that is tried out on the labels of 64 rows, by name (`agentrl graders list`)."""
    reward_kwargs: Annotated[dict[str, JSON], by_reference("reward_kwargs")] = Field(default_factory=dict)
    """Settings of the grader in reward (JSON)."""


class _Flags(Section):
    data: ColumnChoice = ColumnChoice()
    grader: _Grader = _Grader()


@click.group(cls=CommandGroup)
def data() -> None:
    """Commands for files of prompts, as in `agentrl train --prompt-data FILE`."""


@config_flags(_Flags)
@data.command("check")
@click.argument("path", metavar="FILE|FOLDER")
@click.option("--split", default="train", show_default=True, help="Split, of a folder that holds several.")
@click.option("--tokenizer", metavar="DIR", help="Model directory; its tokenizer counts the lengths.")
@click.option(
    "--dialect",
    type=click.Choice(["chat", "inline"]),
    default="chat",
    show_default=True,
    help="Format in which prompts are rendered for the tokenizer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(
    path: str, split: str, tokenizer: str | None, dialect: str, as_json: bool, **flags: str | bool | None
) -> None:
    """Read every row of FILE; report invalid rows, counts, lengths and three rendered prompts.

    With --reward, labels are graded, too: written as the prompt asks for it, a label has to get full marks,
    and an empty answer none.

    FILE may be `path@[0:100]`. Exit code 2: a row is no valid prompt, or the grader does not fit it.
    """
    chosen = parse(_Flags, by_section(_Flags, flag_values(flags, _Flags)), source="the flags")
    choice, grader = chosen.data, chosen.grader
    report = report_on(
        path, choice.columns, split=split, measure=_measure(tokenizer, dialect), progress=_with_progress_bar
    )
    if grader.reward is not None:
        unfit = misfits_of_rows(grader.reward, grader.reward_kwargs, path, choice.columns, split=split)
        report = replace(report, unfit=tuple(run_until_signal(unfit)) or report.unfit)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        _show(report, Console(highlight=False))
    if not report.ok:
        sys.exit(BAD_DATA)


def _measure(tokenizer: str | None, dialect: str) -> Measure:
    if tokenizer is None:
        return CHARACTERS
    require("counting tokens", *TRAINING)
    from agentrl.assembly.measure import tokenizer_measure

    return tokenizer_measure(tokenizer, dialect)


def _with_progress_bar(numbers: Iterable[int], total: int) -> Iterable[int]:
    # On stderr, since stdout has the report.
    console = Console(stderr=True)
    return track(numbers, "reading", total, console=console, transient=True, disable=not console.is_terminal)


def _show(report: DataReport, console: Console) -> None:
    figures = Table(title=escape(report.path), show_header=False)
    figures.add_row("prompts", f"{report.prompts:,}")
    figures.add_row("invalid rows", f"{report.bad:,}")
    figures.add_row("with an answer", f"{report.labels:,}")
    figures.add_row("with tools", f"{report.tools:,}")
    for count, number in report.turns.items():
        figures.add_row(f"of {count} message{'' if count == 1 else 's'}", f"{number:,}")
    for name, value in report.lengths.items():
        figures.add_row(f"{report.unit}, {name}", f"{value:,.0f}")
    figures.add_row("fingerprint", report.fingerprint)
    console.print(figures)
    for text in report.rendered:
        console.rule(style="dim")
        console.print(text, markup=False)
    if report.rendered:
        console.rule(style="dim")
    for sentence in report.problems:
        console.print(f"[bold red]error[/] {escape(sentence)}", soft_wrap=True)
    if report.bad > len(report.problems):
        console.print(f"and {report.bad - len(report.problems):,} more.")
    for sentence in report.unfit:
        console.print(f"[bold red]unfit[/] {escape(sentence)}", soft_wrap=True)
