"""`agentrl recipes`: run files for published models and data sets on GPUs, and scripts that start them."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import CommandGroup
from agentrl.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).with_name("recipe_files")


@click.group(cls=CommandGroup)
def recipes() -> None:
    """Run files for published models and data sets; each says what it needs, and where its numbers are from.
    Scripts that start one on many machines: `slurm`, `ray-job`.

    `agentrl recipes show NAME > run.toml` writes one, and `agentrl train run.toml --dry-run` says what it
    takes and whether it fits on the machine at hand.
    """


@recipes.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, for machines.")
def list_command(as_json: bool) -> None:
    """List all recipes."""
    summaries = {name: _summary(text) for name, text in all_recipes().items()}
    if as_json:
        click.echo(json.dumps([{"name": name, "summary": text} for name, text in summaries.items()]))
        return
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    for name, text in summaries.items():
        table.add_row(Text(name), Text(text))
    Console().print(table)


@recipes.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Print the run file, or the script, NAME."""
    found = all_recipes()
    if name not in found:
        listed = ", ".join(found)
        raise ConfigError(f"there is no recipe `{name}`.{did_you_mean(name, found)} There are {listed}.")
    click.echo(found[name], nl=False)


def all_recipes() -> dict[str, str]:
    """The text of each recipe by its name."""
    files = (*sorted(FOLDER.glob("*.toml")), *sorted(FOLDER.glob("*.sh")))
    return {path.stem: path.read_text("utf-8") for path in files}


def _summary(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")
