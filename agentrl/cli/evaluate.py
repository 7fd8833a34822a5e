"""`agentrl eval`."""

from __future__ import annotations

import json

import rich_click as click
from rich.console import Console
from rich.table import Table

from agentrl.cli.flags import read_json_object


@click.command("eval")
@click.argument("env_id")
@click.option("--model", required=True, metavar="DIR", help="Hugging Face model directory to score.")
@click.option("--n", default=512, show_default=True, type=click.IntRange(1), help="Episodes to play (count).")
@click.option(
    "--temperature",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.0),
    help="Sampling temperature; 0 = greedy.",
)
@click.option("--split", default="test", show_default=True, help="Split whose tasks are played.")
@click.option("--seed", default=0, show_default=True, help="Seeds worlds and sampling.")
@click.option("--env-kwargs", default="{}", metavar="JSON", help="Arguments the environment is made with.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def evaluate_command(
    env_id: str,
    model: str,
    n: int,
    temperature: float,
    split: str,
    seed: int,
    env_kwargs: str,
    as_json: bool,
) -> None:
    """Play N episodes of ENV_ID with a model and score them, in the same loop as training.

    A failed episode is counted by kind and stands in no mean.
    """
    from agentrl.evaluate import evaluate

    report = evaluate(
        env_id,
        model,
        n=n,
        temperature=temperature,
        split=split,
        seed=seed,
        env_kwargs=read_json_object("--env-kwargs", env_kwargs),
        quiet=as_json,
    )
    if as_json:
        click.echo(json.dumps(report.as_json()))
        return
    table = Table(title=f"{report.env_id} ({report.split}), temperature {report.temperature:g}")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("mean", f"{report.mean:.3f} ± {report.stderr:.3f}")
    for name, value in report.by.items():
        table.add_row(f"mean, {name}", f"{value:.3f}")
    table.add_row("episodes scored", str(report.n))
    for kind, count in (report.failures or {"failures": 0}).items():
        table.add_row(f"failed: {kind}" if report.failures else kind, str(count))
    table.add_row("turns per episode", f"{report.turns:.2f}")
    table.add_row("model tokens per episode", f"{report.policy_tokens:.1f}")
    table.add_row("seconds", f"{report.seconds:.1f}")
    Console().print(table)
