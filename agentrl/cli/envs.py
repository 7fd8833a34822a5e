"""`agentrl envs`."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich_click as click
from rich.console import Console
from rich.table import Table

from agentrl.cli.envs_check import check_command
from agentrl.cli.envs_new import new_command
from agentrl.envs import Env, find
from agentrl.envs.registry import env_ids
from agentrl.types import JSON


@click.group()
def envs() -> None:
    """The environments that are installed."""


envs.add_command(check_command)
envs.add_command(new_command)


@envs.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, for machines.")
def list_command(as_json: bool) -> None:
    """List every registered environment."""
    rows = [{"id": env_id, "description": _summary(type(find(env_id).make()))} for env_id in env_ids()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table("id", "what it is")
    for row in rows:
        table.add_row(row["id"], row["description"])
    Console().print(table)


@envs.command("show")
@click.argument("env_id")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def show_command(env_id: str, as_json: bool) -> None:
    """Show one environment: its tools, limits, dialect and a first task."""
    facts = _facts(find(env_id).make())
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(title=env_id, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value, indent=1))
    Console().print(table)


def _facts(env: Env) -> dict[str, JSON]:
    tasks = env.tasks("train")
    return {
        "id": env.id,
        "description": _summary(type(env)),
        "tools": [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in env.tool_schemas],
        "limits": asdict(env.limits),
        "dialect": asdict(env.dialect),
        "train_tasks": len(tasks),
        "first_task": tasks[0].prompt[-1].content if tasks else None,
    }


def _summary(env_class: type[Env]) -> str:
    return (env_class.__doc__ or "").strip().split("\n")[0]
