"""`agentrl envs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

import rich_click as click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from agentrl.cli.envs_check import check_command
from agentrl.cli.envs_new import new_command
from agentrl.envs import BaseEnv, find, tasks_of
from agentrl.envs.registry import env_ids, gymnasium_id
from agentrl.errors import UserError
from agentrl.types import JSON

_COLUMNS = ("id", "expert_score", "chance_score", "splits", "tools", "description")
_PLAIN = (str, int, float, bool)


@click.group()
def envs() -> None:
    """The environments that are installed."""


envs.add_command(check_command)
envs.add_command(new_command)


@envs.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, for machines.")
def list_command(as_json: bool) -> None:
    """List every registered environment: its splits, scores and tools."""
    rows = [_row(env_id) for env_id in env_ids()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("id", "expert", "chance"):
        table.add_column(name, no_wrap=True)
    for name in ("splits", "tools", "description"):
        table.add_column(name)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


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


def _row(env_id: str) -> dict[str, JSON]:
    try:
        env = find(env_id).make()
        tools: list[JSON] = [tool.name for tool in env.tool_schemas]
    except UserError as error:
        # One broken package must not hide all others.
        return {**dict.fromkeys(_COLUMNS), "id": env_id, "description": str(error)}
    return {
        "id": env_id,
        "expert_score": env.expert_score,
        "chance_score": env.chance_score,
        "splits": list(env.splits),
        "tools": tools,
        "description": _summary(type(env)),
    }


def _cell(value: JSON) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value or "")


def _facts(env: BaseEnv, kwargs: Mapping[str, object]) -> dict[str, JSON]:
    splits = {split: tasks_of(env, split) for split in env.splits}
    tasks = next((tasks for tasks in splits.values() if tasks), ())
    return {
        "id": env.id,
        "gymnasium_id": gymnasium_id(env.id),
        "possible_agents": list(env.possible_agents),
        "description": _summary(type(env)),
        "kwargs": {
            name: value if isinstance(value, _PLAIN) else repr(value) for name, value in kwargs.items()
        },
        "expert_score": env.expert_score,
        "chance_score": env.chance_score,
        "splits": {split: len(tasks) for split, tasks in splits.items()},
        "tools": [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in env.tool_schemas],
        "limits": asdict(env.limits),
        "dialect": asdict(env.dialect),
        "first_task": tasks[0].prompt[-1].text if tasks else None,
    }


def _summary(env_class: type[BaseEnv]) -> str:
    return (env_class.__doc__ or "").strip().split("\n")[0]
