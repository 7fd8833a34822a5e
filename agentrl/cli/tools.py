"""`agentrl tools`."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import cast

import rich_click as click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.cli.flags import read_json_object
from agentrl.errors import ToolError, UserError
from agentrl.tools import Tool, Toolkit, make_tool, tool_names
from agentrl.tools.registry import find_tool, is_function
from agentrl.types import JSON

_TOOL, _TOOLKIT = "function", "toolkit"


@click.group()
def tools() -> None:
    """The tools that a run can offer by name: `agentrl train --tools python,calculator`."""


@tools.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, for machines.")
def list_command(as_json: bool) -> None:
    """List every tool that is installed, and the arguments it is made with.

    A package adds its own with the entry point group `agentrl.tools`.
    """
    rows = [_row(name) for name in tool_names()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("what it is", "made with"):
        table.add_column(title)
    for row in rows:
        made_with = cast("Mapping[str, str]", row["arguments"])
        table.add_row(str(row["name"]), escape(str(row["description"])), ", ".join(made_with) or "-")
    Console().print(table)


@tools.command("show")
@click.argument("name")
@click.option(
    "--tool-kwargs",
    default="{}",
    metavar="JSON",
    help="Arguments to make it with (a JSON object) [default: {}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def show_command(name: str, tool_kwargs: str, as_json: bool) -> None:
    """Show a tool: the arguments it is made with, and what it tells the model.

    A toolkit is opened for that, as for one episode:

    agentrl tools show mcp --tool-kwargs '{"command": "mcp-server-time"}'
    """
    kwargs = read_json_object("--tool-kwargs", tool_kwargs)
    facts = {**_row(name, whole=True), **_told(name, kwargs)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(title=name, show_header=False)
    for title, value in facts.items():
        table.add_row(title, escape(value if isinstance(value, str) else json.dumps(value, indent=1)))
    Console().print(table)


def _row(name: str, *, whole: bool = False) -> dict[str, JSON]:
    try:
        thing = find_tool(name)
    except UserError as error:
        if whole:
            raise
        # One broken package must not hide all others.
        return {"name": name, "kind": None, "description": str(error), "arguments": {}}
    is_made = not (is_function(thing) or isinstance(thing, Toolkit))
    said = inspect.getdoc(thing) or ""
    return {
        "name": name,
        "kind": _TOOL if is_function(thing) else _TOOLKIT,
        "description": said if whole else " ".join(said.split("\n\n", maxsplit=1)[0].split()),
        "arguments": _arguments(cast("Callable[..., object]", thing)) if is_made else {},
    }


def _arguments(factory: Callable[..., object]) -> dict[str, JSON]:
    """Each argument's type, and its default where it has one, as they are written."""
    parameters = inspect.signature(factory).parameters
    return {name: str(one).partition(": ")[2].replace("'", "") for name, one in parameters.items()}


def _told(name: str, kwargs: Mapping[str, JSON]) -> dict[str, JSON]:
    """What the model would be told, or why that cannot be said without arguments."""
    try:
        offered = asyncio.run(_opened(make_tool(name, **kwargs)))
    except (UserError, ToolError) as error:
        if kwargs:
            raise
        return {"tells_the_model": f"depends on its arguments: {error}"}
    schemas = [tool.schema for tool in offered]
    return {"tells_the_model": [{**one._asdict(), "parameters": dict(one.parameters)} for one in schemas]}


async def _opened(made: object) -> tuple[Tool, ...]:
    if not isinstance(made, Toolkit):
        assert is_function(made), "make_tool gives one or the other"
        return (Tool.of(made),)
    async with made.episode() as offered:
        return tuple(offered)
