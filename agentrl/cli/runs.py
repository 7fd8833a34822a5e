"""`agentrl runs`: the runs in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

import agentrl
from agentrl.assembly.load import read_run
from agentrl.errors import ConfigError
from agentrl.extras import TRAINING, require
from agentrl.observe import read_metrics
from agentrl.observe.history import METRICS, attempts, is_locked
from agentrl.types import JSON

if TYPE_CHECKING:
    from agentrl.run.audit import Audit

_FOLDER = click.option("--output-dir", default="runs", show_default=True, help="Folder of the runs.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("runs")
def runs() -> None:
    """List the runs of a folder, show one, audit it, resume it."""


@runs.command("list")
@_FOLDER
@_JSON
def list_command(output_dir: str, as_json: bool) -> None:
    """List the runs, the newest last: state, steps, attempts, newest metrics."""
    facts = [facts_of(path.parent) for path in sorted(Path(output_dir).glob("*/config.toml"), key=_age)]
    if as_json:
        click.echo(json.dumps(facts))
        return
    for row in facts:
        click.echo(
            f"{row['name']:<32} {row['state']:<12} step {row['step']:>6}  attempts {row['attempts']}  "
            f"{row['env']}"
        )


@runs.command("show")
@click.argument("name")
@_FOLDER
@_JSON
def show_command(name: str, output_dir: str, as_json: bool) -> None:
    """Show a run: state, attempts, checkpoints, the metrics of its last step."""
    facts = facts_of(run_folder(name, output_dir))
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        click.echo(f"{key:<12} {value}")


@runs.command("audit")
@click.argument("name")
@_FOLDER
@_JSON
def audit_command(name: str, output_dir: str, as_json: bool) -> None:
    """Account for every prompt of a run: trained, dropped with a reason, or skipped.

    Exit code 1 if one is not accounted for.
    """
    require("an audit", *TRAINING)
    from agentrl.run.audit import audit

    try:
        found = audit(run_folder(name, output_dir))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be audited: {error}; restore that file.") from None
    click.echo(json.dumps(found.as_json()) if as_json else _text(found))
    if found.problems:
        sys.exit(1)


@runs.command("resume")
@click.argument("name")
@_FOLDER
@click.option("--quiet", is_flag=True, help="Print nothing but the path of the finished run.")
def resume_command(name: str, output_dir: str, quiet: bool) -> None:
    """Resume a run from its last checkpoint (`agentrl train FOLDER --resume` takes settings, too)."""
    result = agentrl.train(run_folder(name, output_dir), resume=True, quiet=quiet)
    if quiet:
        click.echo(str(result.folder))


def run_folder(name: str, output_dir: str) -> Path:
    """The folder of a run, given by its name or its path.

    Raises:
        ConfigError: there is no run.
    """
    for path in (Path(output_dir) / name, Path(name)):
        if (path / "config.toml").exists():
            return path
    raise ConfigError(f"{output_dir} holds no run `{name}`; `agentrl runs list` lists them.")


def facts_of(folder: Path) -> dict[str, JSON]:
    """What a run's folder says of it.

    Raises:
        ConfigError: its config.toml is of another version.
    """
    config, tries = read_run(folder), attempts(folder)
    rows = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    ended = tries[-1].ended if tries else "not begun"
    return {
        "name": folder.name,
        "env": config.env.env,
        "state": "running" if is_locked(folder) else ended or "killed",
        "step": max((int(row["step"] or 0) for row in rows), default=0),
        "of": config.rollout.num_rollout,
        "attempts": len(tries),
        "checkpoints": [path.name for path in sorted((folder / "checkpoints").glob("step_*"))],
        "metrics": {name: value for name, value in (rows[-1] if rows else {}).items() if name != "step"},
    }


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _text(found: Audit) -> str:
    rows = {
        "started": f"{found.started} prompts",
        "trained": f"{found.trained}",
        **{f"dropped, {reason}": f"{number}" for reason, number in sorted(found.dropped.items())},
        "skipped": f"{found.skipped}",
        "ahead of the last checkpoint": f"{found.ahead}",
        **{f"rolled back, {name}": f"{number} episodes" for name, number in found.rolled_back.items()},
    }
    lines = [f"{name:<30} {value}" for name, value in rows.items()]
    return "\n".join([*lines, *(found.problems or ["Every prompt is accounted for, once."])])
