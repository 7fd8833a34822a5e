"""`agentrl train`, and `agentrl rollout`, which trains nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.keywords import TrainSettings
from agentrl.assembly.load import load_run
from agentrl.assembly.sections import OF_SFT
from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.errors import ConfigError
from agentrl.records import read_metrics, reconcile
from agentrl.records.history import METRICS
from agentrl.runtime.extras import TRAINING, require
from agentrl.types import JSON

if TYPE_CHECKING:
    from agentrl.run import TrainResult
    from agentrl.run.dry_run import DryRun

# The page of `agentrl train --dry-run`.
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LONGEST_TEXT = 1200


def show_dry_run(run: str | None, settings: Mapping[str, JSON], *, resume: bool | int, as_json: bool) -> None:
    """Validate a run and print the report.

    Raises:
        UserError: something is wrong with the run.
    """
    from agentrl.run.dry_run import MissingPartsError, dry_run

    try:
        report = dry_run(run, settings, resume=resume)
    except MissingPartsError as error:
        _show(error.report, as_json=as_json)
        raise
    _show(report, as_json=as_json)
    if not as_json:
        for line in report.missing:
            Console(highlight=False).print(Text(f"Missing here: {line}", style="yellow"), soft_wrap=True)
        click.echo("Valid; nothing was started." if not report.missing else "Valid, but for what is missing.")


def _show(report: DryRun, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_json()))
        return
    console = Console(highlight=False)
    for name, section in report.sections.items():
        if section:
            console.print(_table(name, section))
    for line in report.notes:
        console.print(Text(line), soft_wrap=True)


def _table(name: str, section: Mapping[str, JSON]) -> Table:
    table = Table(title=Text(name, style="bold"), title_justify="left", show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, text in _rows(section):
        table.add_row(Text(key), Text(text))
    return table


def _rows(section: Mapping[str, JSON]) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        label = key.removesuffix("_bytes").replace("_", " ")
        if isinstance(value, dict):
            yield label, ", ".join(f"{name} {text}" for name, text in _rows(value))
        elif key.endswith("_bytes") and isinstance(value, int):
            yield label, _size_text(value)
        else:
            yield label, _text(value)


def _text(value: JSON) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ..."


def _size_text(size: int) -> str:
    number, unit = float(size), 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{size} B"


_PLAYS_ONLY = "debug_rollout_only"

step_option = click.option(
    "--ckpt-step",
    "step",
    type=click.IntRange(min=0),
    help="Resume from the checkpoint of this step, not from the last one; what came later is put aside.",
)


@config_flags(RunConfig, without=OF_SFT)
@click.command("train", cls=EngineFlags, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run of RUN from its last checkpoint; begin it if it has not begun.",
)
@step_option
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Validate the whole run and print what it would do and need, on one page; start nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object, for machines.")
def train_command(
    run: str | None,
    resume: bool,
    step: int | None,
    quiet: bool,
    dry_run: bool,
    as_json: bool,
    **flags: str | bool | None,
) -> None:
    """Train an agent with the settings of RUN, a TOML file; every setting is also a flag, and flags win.

    RUN may be the folder of a run that was stopped or killed: it is resumed from its last checkpoint.

    With --dry-run everything is validated (environment, prompts, functions, model, arguments of servers,
    memory, disk) and nothing is started. Exit code 2: something is wrong. A machine without GPUs validates a
    run for GPUs, too.

    With --replay FOLDER nothing is played: each step trains on the groups in the journal of that run, and no
    engine is started, so there are no evaluations. The same settings give the same weights.

    Arguments of SGLang's own servers, and of their router, are flags, too: --sglang-mem-fraction-static 0.8,
    --router-max-idle-secs 600.

    Writes <output_dir>/<name>/: config.toml, metrics.jsonl, TensorBoard events, every episode
    (trajectories/), a Hugging Face model (checkpoint/) and report.html.
    """
    settings = flag_values(flags, RunConfig)
    if as_json and not dry_run:
        raise ConfigError("--json prints the report of --dry-run; add --dry-run, or leave --json out.")
    if dry_run:
        # An invalid setting is reported at once, not after the seconds that importing torch takes.
        load_run(run, settings)
        require("a dry run", *TRAINING)
        show_dry_run(run, settings, resume=resumed_from(resume, step), as_json=as_json)
        return
    result = _trained(run, settings, resume=resumed_from(resume, step), quiet=quiet)
    if quiet:
        click.echo(str(result.folder))


def resumed_from(resume: bool, step: int | None) -> bool | int:
    """What `agentrl.train` is told of --resume and --ckpt-step."""
    return resume if step is None else step


def _trained(
    run: str | None, settings: Mapping[str, JSON], *, resume: bool | int, quiet: bool
) -> TrainResult:
    # Flags have the names of the keywords, and are checked where these are.
    return agentrl.train(run, resume=resume, quiet=quiet, **cast(TrainSettings, settings))


@config_flags(RunConfig, without=(*OF_SFT, _PLAYS_ONLY, "replay", "load_debug_rollout_data"))
@click.command("rollout", cls=EngineFlags, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the rollout of RUN after its last checkpoint; begin it if it has not begun.",
)
@step_option
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def rollout_command(
    run: str | None,
    resume: bool,
    step: int | None,
    quiet: bool,
    as_json: bool,
    **flags: str | bool | None,
) -> None:
    """Play num_rollout batches with the settings of RUN, a TOML file, and train on nothing.

    Prompts, limits, retries and filter are those of `agentrl train`, and so are settings and flags; those of
    training have no effect. The policy is the model as it is: there is no warm start, no trainer is started,
    and nothing is evaluated (`agentrl eval` does that). `agentrl train --replay FOLDER` trains on the
    episodes.

    Writes <output_dir>/<name>/: config.toml, metrics.jsonl, TensorBoard events, every episode
    (trajectories/) and report.html.
    """
    settings: dict[str, JSON] = {**flag_values(flags, RunConfig), _PLAYS_ONLY: True}
    load_run(run, settings)
    require("playing with a model", *TRAINING)
    result = _trained(run, settings, resume=resumed_from(resume, step), quiet=quiet or as_json)
    if as_json:
        click.echo(json.dumps(_played(result.folder)))
    elif quiet:
        click.echo(str(result.folder))


def _played(folder: Path) -> dict[str, JSON]:
    """What a run that only plays has recorded: steps, episodes by outcome, the mean reward."""
    counts = reconcile(folder)
    rows = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    rewards = [row["rollout/raw_reward"] or 0.0 for row in rows]
    return {
        "folder": str(folder),
        "steps": len(rows),
        "episodes": counts.played,
        "recorded": counts.recorded,
        "dropped": dict(counts.dropped),
        "raw_reward": fmean(rewards) if rewards else None,
    }
