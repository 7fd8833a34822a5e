"""`agentrl plot`."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.errors import ConfigError

_CURVES = ("sampled=eval/sampled", "greedy=eval/greedy")


@click.command("plot", cls=Command)
@click.argument("run_folders", nargs=-1, required=True, type=click.Path(file_okay=False))
@click.option("--out", default="curves.png", show_default=True, help="Picture to write: .png, .svg or .pdf.")
@click.option(
    "--curve", "curves", multiple=True, metavar="LABEL=METRIC", help=f"What to draw. [default: {_CURVES}]"
)
@click.option("--title", default="", help="Title of the picture.")
def plot_command(run_folders: tuple[str, ...], out: str, curves: tuple[str, ...], title: str) -> None:
    """Draw the curves of RUN_FOLDERS: every run a thin line, their mean a thick one."""
    from agentrl.records import read_metrics
    from agentrl.records.history import METRICS
    from agentrl.view.curves import plot_curves

    invalid = [curve for curve in curves if "=" not in curve]
    if invalid:
        raise ConfigError(f"--curve takes LABEL=METRIC such as {_CURVES[0]}, got {invalid[0]!r}.")
    for folder in run_folders:
        if not (Path(folder) / METRICS).exists():
            raise ConfigError(f"{folder} holds no {METRICS}; name the folder of a run that has begun.")
    try:
        runs = {folder: read_metrics(Path(folder) / METRICS) for folder in run_folders}
        metrics = dict(curve.split("=", 1) for curve in curves or _CURVES)
        click.echo(str(plot_curves(runs, metrics, Path(out), title=title)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"nothing was drawn: {error}; name folders of runs and metrics that they hold."
        ) from None
