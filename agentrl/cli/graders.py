"""`agentrl graders`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from typing import cast

import rich_click as click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.assembly.rewards import reward_function
from agentrl.cli.commands import CommandGroup
from agentrl.cli.flags import read_json_object
from agentrl.cli.tools import arguments_of
from agentrl.envs.graders import grader_names, group_grader_names
from agentrl.envs.graders.registry import find_grader
from agentrl.envs.normal_form import NO_LABEL
from agentrl.envs.scoring import graded
from agentrl.errors import ConfigError, GradingError
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON, RewardParts, Task

_STDIN = "-"


@click.group(cls=CommandGroup)
def graders() -> None:
    """The graders that a run can name: `agentrl train --env SingleTurn-v0 --reward math`."""


@graders.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, for machines.")
def list_command(as_json: bool) -> None:
    """List every grader with its settings: of an answer (`reward`), and of a group (`group_reward`)."""
    named = [*((name, "reward") for name in grader_names())]
    named += [(name, "group_reward") for name in group_grader_names()]
    rows = [_row(name, setting) for name, setting in named]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for title in ("setting", "description", "its settings"):
        table.add_column(title)
    for row in rows:
        settings = cast("Mapping[str, str]", row["settings"])
        described = escape(str(row["description"]))
        table.add_row(str(row["name"]), str(row["setting"]), described, ", ".join(settings) or "-")
    Console().print(table)


@graders.command("grade")
@click.argument("name")
@click.argument("answer")
@click.option("--label", default=None, metavar="TEXT", help="The right answer.")
@click.option(
    "--metadata", default="{}", metavar="JSON", help="Metadata of the task (a JSON object) [default: {}]"
)
@click.option(
    "--reward-kwargs",
    default="{}",
    metavar="JSON",
    help="Settings of the grader (a JSON object) [default: {}]",
)
@click.option("--question", default="", metavar="TEXT", help="The question, for graders that read it.")
def grade_command(
    name: str, answer: str, label: str | None, metadata: str, reward_kwargs: str, question: str
) -> None:
    """Grade one ANSWER by the grader NAME, or package.module:function; print the reward and its parts.

    ANSWER is a text, or - for standard input:

    agentrl graders grade math 'It is \\boxed{1/2}.' --label 0.5
    """
    function = reward_function(name, read_json_object("--reward-kwargs", reward_kwargs))
    facts = read_json_object("--metadata", metadata)
    task = Task.ask("command-line", question, label, **facts)
    text = sys.stdin.read() if answer == _STDIN else answer
    try:
        reward = run_until_signal(graded(function, task, text, None))
    except GradingError as error:
        if NO_LABEL not in error.detail:
            raise
        raise ConfigError(
            f"the grader `{name}` compares with the right answer; give it with --label."
        ) from None
    parts = dict(reward.parts) if isinstance(reward, RewardParts) else {}
    click.echo(json.dumps({"reward": float(reward), "parts": parts}))


def _row(name: str, setting: str) -> dict[str, JSON]:
    grader = find_grader(name)
    doc = inspect.getdoc(grader) or ""
    return {
        "name": name,
        "setting": setting,
        "description": " ".join(doc.split("\n\n", maxsplit=1)[0].split()),
        "settings": arguments_of(grader) if isinstance(grader, type) else {},
    }
