"""`agentrl tools`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import cast

import rich_click as click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.cli.commands import CommandGroup
from agentrl.cli.flags import read_json_object
from agentrl.errors import ToolError, UserError
from agentrl.runtime.interrupts import run_until_signal
from agentrl.tools import Tool, Toolkit, make_tool, tool_names
from agentrl.tools.registry import find_tool, is_function
from agentrl.types import JSON

_TOOL, _TOOLKIT = "function", "toolkit"


@click.group(cls=CommandGroup)
def tools() -> None:
    """The tools that a run can offer by name: `agentrl train --tools python,calculator`."""


@tools.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, for machines.")
def list_command(as_json: bool) -> None:
    """List every tool that is installed, with the arguments of its constructor.

    A package adds its own with the entry point group `agentrl.tools`.
    """
    rows = [_row(name) for name in tool_names()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("description", "arguments"):
        table.add_column(title)
    for row in rows:
        arguments = cast("Mapping[str, str]", row["arguments"])
        table.add_row(str(row["name"]), escape(str(row["description"])), ", ".join(arguments) or "-")
    Console().print(table)


@tools.command("show")
@click.argument("name")
@click.option(
    "--tool-kwargs",
    default="{}",
    metavar="JSON",
    help="Arguments of its constructor (a JSON object) [default: {}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def show_command(name: str, tool_kwargs: str, as_json: bool) -> None:
    """Show a tool: the arguments of its constructor, and its schemas, which the model receives.

    A toolkit is opened for that, as for one episode:

    agentrl tools show mcp --tool-kwargs '{"command": "mcp-server-time"}'
    """
    kwargs = read_json_object("--tool-kwargs", tool_kwargs)
    facts = {**_row(name, in_full=True), **_schemas(name, kwargs)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(title=name, show_header=False)
    for title, value in facts.items():
        table.add_row(title, escape(value if isinstance(value, str) else json.dumps(value, indent=1)))
    Console().print(table)


def _row(name: str, *, in_full: bool = False) -> dict[str, JSON]:
    try:
        tool = find_tool(name)
    except UserError as error:
        if in_full:
            raise
        # One broken package must not hide all others.
        return {"name": name, "kind": None, "description": str(error), "arguments": {}}
    is_factory = not (is_function(tool) or isinstance(tool, Toolkit))
    doc = inspect.getdoc(tool) or ""
    return {
        "name": name,
        "kind": _TOOL if is_function(tool) else _TOOLKIT,
        "description": doc if in_full else " ".join(doc.split("\n\n", maxsplit=1)[0].split()),
        "arguments": arguments_of(cast("Callable[..., object]", tool)) if is_factory else {},
    }


def arguments_of(factory: Callable[..., object]) -> dict[str, JSON]:
    """Each argument's type, and its default where it has one, as in the source."""
    parameters = inspect.signature(factory).parameters
    return {
        name: str(parameter).partition(": ")[2].replace("'", "") for name, parameter in parameters.items()
    }


def _schemas(name: str, kwargs: Mapping[str, JSON]) -> dict[str, JSON]:
    """The schemas that the model receives, or the reason why they are unknown without arguments."""
    try:
        offered = run_until_signal(_opened(make_tool(name, **kwargs)))
    except (UserError, ToolError) as error:
        if kwargs:
            raise
        return {"schemas": f"depends on its arguments: {error}"}
    schemas = [tool.schema for tool in offered]
    return {"schemas": [{**schema._asdict(), "parameters": dict(schema.parameters)} for schema in schemas]}


async def _opened(tool: object) -> tuple[Tool, ...]:
    if not isinstance(tool, Toolkit):
        assert is_function(tool), "make_tool returns a function or a toolkit"
        return (Tool.of(tool),)
    async with tool.episode() as offered:
        return tuple(offered)
