"""`agentrl train`, and `agentrl rollout`, which trains nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import cast

import rich_click as click

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.keywords import TrainSettings
from agentrl.assembly.load import load_run
from agentrl.assembly.sections import SftSection
from agentrl.cli.dry_run import show_dry_run
from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.errors import ConfigError
from agentrl.records import read_metrics, reconcile
from agentrl.records.history import METRICS
from agentrl.runtime.extras import TRAINING, require
from agentrl.types import JSON

_PLAYS_ONLY = "debug_rollout_only"


@config_flags(RunConfig, without=SftSection.model_fields)
@click.command("train", cls=EngineFlags, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run of RUN from its last checkpoint; begin it if it has not begun.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Validate the whole run and print what it would do and need, on one page; start nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object, for machines.")
def train_command(
    run: str | None, resume: bool, quiet: bool, dry_run: bool, as_json: bool, **flags: str | bool | None
) -> None:
    """Train an agent with the settings of RUN, a TOML file; every setting is also a flag, and flags win.

    RUN may be the folder of a run that was stopped or killed: it is resumed from its last checkpoint.

    With --dry-run everything is validated (environment, prompts, functions, model, arguments of servers,
    memory, disk) and nothing is started. Exit code 2: something is wrong. A machine without GPUs validates a
    run for GPUs, too.

    With --replay FOLDER nothing is played: each step trains on the groups in the journal of that run, and no
    engine is started, so there are no evaluations. The same settings give the same weights.

    Arguments of SGLang's own servers are flags, too: --sglang-mem-fraction-static 0.8.

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
        show_dry_run(run, settings, resume=resume, as_json=as_json)
        return
    result = agentrl.train(run, resume=resume, quiet=quiet, **cast(TrainSettings, settings))
    if quiet:
        click.echo(str(result.folder))


@config_flags(RunConfig, without=(*SftSection.model_fields, _PLAYS_ONLY, "replay", "load_debug_rollout_data"))
@click.command("rollout", cls=EngineFlags, context_settings={"show_default": False})
@click.argument("run", required=False, type=click.Path())
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the rollout of RUN after its last checkpoint; begin it if it has not begun.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def rollout_command(
    run: str | None, resume: bool, quiet: bool, as_json: bool, **flags: str | bool | None
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
    result = agentrl.train(run, resume=resume, quiet=quiet or as_json, **cast(TrainSettings, settings))
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
