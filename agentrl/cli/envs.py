"""`agentrl envs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby

import rich_click as click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.cli.envs_check import check_command
from agentrl.cli.envs_new import new_command
from agentrl.envs import AnyEnv, find, tasks_of
from agentrl.envs.base import GROUPS
from agentrl.envs.catalog import CatalogEntry, by_family, catalog, markdown, needs_of, summary
from agentrl.envs.registry import gymnasium_id, matching
from agentrl.types import JSON

_PLAIN = (str, int, float, bool)


@click.group()
def envs() -> None:
    """The environments that are installed."""


envs.add_command(check_command)
envs.add_command(new_command)


@envs.command("list")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, every environment on its own.")
@click.option("--all", "each", is_flag=True, help="List the environments of a family one by one.")
def list_command(pattern: str, as_json: bool, each: bool) -> None:
    """List the registered environments by group: what each needs, its scores and its limits.

    PATTERN: ids to list, such as 'ReasoningGym-*'; left out, all. A family, many environments of one class,
    is one row, until a pattern or --all lists them.
    """
    entries = catalog(matching(pattern))
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries]))
        return
    shown = entries if each or pattern != "*" else by_family(entries)
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("id", "expert", "chance", "needs"):
        table.add_column(name, no_wrap=name != "needs")
    for name in ("tools", "description"):
        table.add_column(name)
    for group, rows in groupby(shown, key=lambda entry: entry.group):
        table.add_section()
        table.add_row(f"[bold]{GROUPS.get(group, group)}[/bold]")
        for row in rows:
            table.add_row(*_cells(row))
    Console().print(table)
    Console().print("None that ships needs the network. Extras in red are not installed.")


@envs.command("table")
@click.argument("pattern", default="*")
def table_command(pattern: str) -> None:
    """Print the table of the guide "Environments that ship" as Markdown."""
    for line in markdown(by_family(catalog(matching(pattern)))):
        click.echo(line)


@envs.command("show")
@click.argument("env_id")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def show_command(env_id: str, as_json: bool) -> None:
    """Show one environment: its splits, scores, tools, limits, dialect and a first task."""
    spec = find(env_id)
    facts = _facts(spec.make(), spec.kwargs)
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(title=env_id, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value, indent=1))
    Console().print(table)


def _cells(entry: CatalogEntry) -> tuple[str, ...]:
    number = "" if entry.members == 1 else f" ({entry.members})"
    expert = f"{entry.expert_score:.3g}" if entry.has_expert and entry.expert_score is not None else "-"
    chance = "" if entry.chance_score is None else f"{entry.chance_score:.3g}"
    needs = [f"[red]{name}[/red]" if name in entry.missing else name for name in entry.needs]
    text = escape(entry.error or entry.description)
    return f"{entry.id}{number}", expert, chance, ", ".join(needs), ", ".join(entry.tools), text


def _facts(env: AnyEnv, kwargs: Mapping[str, object]) -> dict[str, JSON]:
    splits = {split: tasks_of(env, split) for split in env.splits}
    tasks = next((tasks for tasks in splits.values() if tasks), ())
    return {
        "id": env.id,
        "gymnasium_id": gymnasium_id(env.id),
        "possible_agents": list(env.possible_agents),
        "group": env.group,
        "needs": list(needs_of(env)),
        "has_expert": env.has_expert,
        "description": summary(type(env)),
        "kwargs": {
            name: value if isinstance(value, _PLAIN) else repr(value) for name, value in kwargs.items()
        },
        "expert_score": env.expert_score,
        "chance_score": env.chance_score,
        "splits": {split: len(tasks) for split, tasks in splits.items()},
        "tools": [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in env.tool_schemas],
        "limits": asdict(env.limits),
        "dialect": asdict(env.dialect),
        "first_task": tasks[0].prompt[-1].text if tasks and tasks[0].prompt else None,
    }
