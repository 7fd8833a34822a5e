"""`agentrl eval`."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.evaluation.config import EvalConfig

if TYPE_CHECKING:
    from agentrl.evaluation.report import EvalReport


class EvalCommand(EngineFlags):
    """The command that scores one model."""

    several = MappingProxyType({"model": "name one, or several to `agentrl benchmark`, which compares them"})


@config_flags(EvalConfig)
@click.command("eval", cls=EvalCommand)
@click.argument("env_id")
@click.option("--model", metavar="DIR", help="Hugging Face model directory to score.")
@click.option(
    "--resume", is_flag=True, help="Go on with the evaluation in --output-dir; begin it if it has not begun."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def evaluate_command(
    env_id: str, model: str | None, resume: bool, as_json: bool, **flags: str | bool | None
) -> None:
    """Play episodes of ENV_ID with a model and score them, in the same loop as training.

    The model is a directory (--model), or behind a chat endpoint (--openai-url, --openai-model). A failed
    episode is counted by kind and excluded from all means. With --engine sglang and no --sglang-url, servers
    are started for it, with SGLang's own arguments as flags: --sglang-mem-fraction-static 0.8.

    With --output-dir every episode is written as soon as it has ended. An evaluation that was interrupted or
    killed goes on with the same command and --resume; none of its episodes is played again.

    Several sets of prompts, each with its own scores: --eval-prompt-data aime aime.jsonl gpqa gpqa.jsonl.
    `agentrl benchmark` scores several models on several environments.
    """
    from agentrl.evaluation.model import evaluate

    report = evaluate(env_id, model, resume=resume, quiet=as_json, **flag_values(flags, EvalConfig))
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        Console().print(_table(report))


def _table(report: EvalReport) -> Table:
    table = Table(title=report.title)
    table.add_column("what")
    table.add_column("value", justify="right")
    for row in report.rows():
        table.add_row(*map(escape, row))
    return table
