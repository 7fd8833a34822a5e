"""The page of `agentrl train --dry-run`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.types import JSON

if TYPE_CHECKING:
    from agentrl.run.dry_run import DryRun

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LONGEST_TEXT = 1200


def show_dry_run(run: str | None, settings: Mapping[str, JSON], *, resume: bool, as_json: bool) -> None:
    """Validate a run and print the report.

    Raises:
        UserError: something is wrong with the run.
    """
    from agentrl.run.dry_run import MissingPartsError, dry_run

    try:
        report = dry_run(run, settings, resume=resume)
    except MissingPartsError as error:
        _show(error.report, as_json=as_json)
        raise
    _show(report, as_json=as_json)
    if not as_json:
        for line in report.missing:
            Console(highlight=False).print(Text(f"Missing here: {line}", style="yellow"), soft_wrap=True)
        click.echo("Valid; nothing was started." if not report.missing else "Valid, but for what is missing.")


def _show(report: DryRun, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_json()))
        return
    console = Console(highlight=False)
    for name, section in report.sections.items():
        if section:
            console.print(_table(name, section))
    for line in report.notes:
        console.print(Text(line), soft_wrap=True)


def _table(name: str, section: Mapping[str, JSON]) -> Table:
    table = Table(title=Text(name, style="bold"), title_justify="left", show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, text in _rows(section):
        table.add_row(Text(key), Text(text))
    return table


def _rows(section: Mapping[str, JSON]) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        label = key.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            yield label, ", ".join(f"{name} {text}" for name, text in _rows(value))
        elif key.endswith("_bytes") and isinstance(value, int):
            yield label, _size_text(value)
        else:
            yield label, _text(value)


def _text(value: JSON) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ..."


def _size_text(size: int) -> str:
    number, unit = float(size), 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{size} B"
