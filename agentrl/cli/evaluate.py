"""`agentrl eval`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import rich_click as click
from rich.console import Console
from rich.table import Table

from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.evaluation.config import EvalConfig

if TYPE_CHECKING:
    from agentrl.evaluation.report import EvalReport


@config_flags(EvalConfig)
@click.command("eval", cls=EngineFlags)
@click.argument("env_id")
@click.option("--model", metavar="DIR", help="Hugging Face model directory to score.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def evaluate_command(env_id: str, model: str | None, as_json: bool, **flags: str | bool | None) -> None:
    """Play episodes of ENV_ID with a model and score them, in the same loop as training.

    The model is a directory (--model), or behind a chat endpoint (--openai-url, --openai-model). A failed
    episode is counted by kind and excluded from all means. With --engine sglang and no --sglang-url, servers
    are started for it, with SGLang's own arguments as flags: --sglang-mem-fraction-static 0.8.

    Several sets of prompts, each with its own scores: --eval-prompt-data aime aime.jsonl gpqa gpqa.jsonl.
    `agentrl benchmark` scores several models on several environments.
    """
    from agentrl.evaluation.model import evaluate

    report = evaluate(env_id, model, quiet=as_json, **flag_values(flags, EvalConfig))
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        Console().print(_table(report))


def _table(report: EvalReport) -> Table:
    table = Table(title=f"{report.env_id} ({report.split}), temperature {report.temperature:g}")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("mean", f"{report.mean:.3f} ± {report.stderr:.3f}")
    for k, value in report.pass_at.items():
        table.add_row(f"pass@{k}", f"{value:.3f}")
    for name, part in report.sets.items():
        table.add_row(f"mean, {name}", f"{part.mean:.3f} ± {part.stderr:.3f}")
        for k, value in part.pass_at.items():
            table.add_row(f"pass@{k}, {name}", f"{value:.3f}")
    for name, value in report.by.items():
        table.add_row(f"mean, {name}", f"{value:.3f}")
    for name, value in report.parts.items():
        table.add_row(f"reward, {name}", f"{value:.3f}")
    table.add_row("episodes scored", str(report.n))
    table.add_row("episodes failed", str(sum(report.failures.values())))
    for kind, count in report.failures.items():
        table.add_row(f"failed: {kind}", str(count))
    table.add_row("turns per episode", f"{report.turns:.2f}")
    table.add_row("model tokens per episode", f"{report.policy_tokens:.1f}")
    for name, count in report.usage.items():
        table.add_row(name.replace("_", " "), str(count))
    if report.cost is not None:
        table.add_row("cost, all episodes", f"{report.cost:.4f}")
        table.add_row("cost per episode", f"{report.cost / (report.n + sum(report.failures.values())):.6f}")
    for name, count in report.counts.items():
        table.add_row(name.replace("/", ", ").replace("_", " "), str(count))
    for name, milliseconds in report.tool_ms.items():
        table.add_row(f"tool, {name}, ms per call", f"{milliseconds:.2f}")
    table.add_row("seconds", f"{report.seconds:.1f}")
    return table
