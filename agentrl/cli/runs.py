"""`agentrl runs`: the runs in a folder."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import read_run
from agentrl.assembly.trust import trust
from agentrl.cli.commands import CommandGroup
from agentrl.config import defaults, effective_values, read_written
from agentrl.errors import ConfigError, RecordError
from agentrl.records import read_metrics
from agentrl.records.diagnoses import read_diagnoses
from agentrl.records.history import METRICS, attempts, command_of, is_locked
from agentrl.records.status import STATUS, read_status
from agentrl.runtime.extras import TRAINING, require
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import check_own
from agentrl.types import JSON
from agentrl.view.comparison import ComparedRun, Comparison
from agentrl.view.live import LivePage
from agentrl.view.scores import figure_text, size_text
from agentrl.view.status import status_lines
from agentrl.view.transcript import visible

if TYPE_CHECKING:
    from agentrl.run.audit import Audit


# `agentrl runs watch`.
PAGE = "live.html"


def watch(
    folder: Path,
    page: Path,
    *,
    every_s: int,
    state_of: Callable[[Path], str],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write a page of a run again and again, until the run is no longer running.

    state_of: of the run. pause: waits for so many seconds between two pages.

    Raises:
        ConfigError: the page cannot be written; or see `check_own`, where it belongs into the folder.
    """
    if page.parent == folder:
        check_own(folder)
    while True:
        state = state_of(folder)
        is_running = state == "running"
        lines = [*status_lines(read_status(folder), state)] if (folder / STATUS).exists() else [state]
        records = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        shown = LivePage(folder.name, lines, records, read_diagnoses(folder), every_s if is_running else 0)
        try:
            write_text(page, shown.html(), errors="replace")
        except OSError as error:
            raise ConfigError(f"{page} cannot be written ({error.strerror}); choose another --out.") from None
        if not is_running:
            click.echo(f"{folder} is {state}: {page} is its last page.")
            return
        pause(every_s)


_FOLDER = click.option("--output-dir", default="runs", show_default=True, help="Folder of the runs.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("runs", cls=CommandGroup)
def runs() -> None:
    """List the runs of a folder; show, watch, audit, resume, compare and clean them."""


@runs.command("list")
@_FOLDER
@_JSON
def list_command(output_dir: str, as_json: bool) -> None:
    """List the runs, the newest last: state, steps, attempts, newest metrics.

    Folders of `agentrl eval` and `agentrl gateway` are left out: `agentrl view` shows their episodes.
    """
    facts = [*_readable(_folders(output_dir))]
    if as_json:
        click.echo(json.dumps(facts))
        return
    if not facts:
        click.echo(f"{output_dir} holds no runs; --output-dir names another folder.", err=True)
    for row in facts:
        click.echo(
            f"{row['name']:<32} {row['state']:<12} step {row['step']:>6}  attempts {row['attempts']}  "
            f"{row['env'] or row['command']}"
        )


@runs.command("show")
@click.argument("name")
@_FOLDER
@_JSON
def show_command(name: str, output_dir: str, as_json: bool) -> None:
    """Show a run: state, attempts, checkpoints, diagnoses, the metrics of its last step and evaluation."""
    facts = facts_of(_trained(name, output_dir))
    if as_json:
        click.echo(json.dumps(facts))
        return
    for line in _lines(facts):
        click.echo(visible(line))


@runs.command("status")
@click.argument("name")
@_FOLDER
@_JSON
def status_command(name: str, output_dir: str, as_json: bool) -> None:
    """Show what a run does at this moment: who waits for whom, versions, staleness, places, utilisation.

    A run writes that each second, and once more when it ends. `oldest` names the group in play that began
    first, its episode, the stage that this is in, and since when: in a run that hangs, what it waits for.
    """
    folder = _trained(name, output_dir)
    state, status = state_of(folder), read_status(folder)
    if as_json:
        click.echo(json.dumps({"name": folder.name, "state": state, **status.as_json()}))
        return
    for line in status_lines(status, state):
        click.echo(line)


@runs.command("watch")
@click.argument("name")
@_FOLDER
@click.option("--out", metavar="FILE", help="The page [default: live.html in the run's folder].")
@click.option(
    "--every", default=5, show_default=True, type=click.IntRange(1, 3600), help="Seconds between two pages."
)
def watch_command(name: str, output_dir: str, out: str | None, every: int) -> None:
    """Write a page of a run while it goes on: its status, diagnoses and curves; a browser shows it anew.

    It reads the run's folder, and costs the run nothing. It ends with the run, or by Ctrl-C.
    """
    folder = _trained(name, output_dir)
    page = folder / PAGE if out is None else Path(out)
    click.echo(f"Open {page.absolute().as_uri()}")
    watch(folder, page, every_s=every, state_of=state_of)


@runs.command("audit")
@click.argument("name")
@_FOLDER
@_JSON
def audit_command(name: str, output_dir: str, as_json: bool) -> None:
    """Account for every prompt of a run: trained, recorded, dropped with a reason, or skipped.

    Exit code 1 if one is not accounted for.
    """
    require("an audit", *TRAINING)
    from agentrl.run.audit import audit

    folder = _trained(name, output_dir)
    if command_of(folder) == "sft":
        raise ConfigError(f"{folder} is a run of `agentrl sft`, which plays no prompts; audit one that does.")
    try:
        found = audit(folder)
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
    folder = _trained(name, output_dir)
    resumed = agentrl.sft if command_of(folder) == "sft" else agentrl.train
    result = resumed(folder, resume=True, quiet=quiet)
    if quiet:
        click.echo(str(result.folder))


@runs.command("trust")
@click.argument("name")
@_FOLDER
@click.option("--yes", is_flag=True, help="Trust it; without it, only list.")
@_JSON
def trust_command(name: str, output_dir: str, yes: bool, as_json: bool) -> None:
    """List what a run may start, open or send to; with --yes, trust a folder that this user has not begun.

    A run's folder names code, programs, addresses and files. One that was downloaded, was copied from another
    user or machine, or whose config.toml was changed, goes on, and its episodes are played again, only after:

        agentrl runs trust runs/downloaded --yes

    The folder may be that of a benchmark, too. Its journals and checkpoints are read without.
    """
    named = trust(_any_folder(name, output_dir), dry_run=not yes)
    if as_json:
        click.echo(json.dumps({"trusted": yes, "files": named}))
        return
    for path, settings in named.items():
        click.echo(f"{path}:")
        for setting, value in settings.items():
            click.echo(visible(f"  {setting} = {value}"))
    click.echo("This is trusted as it is now." if yes else "Add --yes to trust all of this.")


@runs.command("compare")
@click.argument("names", nargs=-1, required=True)
@_FOLDER
@_JSON
@click.option(
    "--html", metavar="FILE", help="Also write a page, with the curves of all runs in shared charts."
)
def compare_command(names: tuple[str, ...], output_dir: str, as_json: bool, html: str | None) -> None:
    """Compare runs: settings that differ, held-out scores, last metrics, wall and CPU time.

    `agentrl plot` draws one curve of them as a picture.
    """
    folders = [_trained(name, output_dir) for name in dict.fromkeys(names)]
    if len(folders) < 2:
        raise ConfigError("a comparison needs two runs or more; `agentrl runs list` lists them.")
    # Two folders of one name are told apart by their paths.
    short = len({folder.name for folder in folders}) == len(folders)
    compared = {folder.name if short else str(folder): _compared(folder) for folder in folders}
    comparison = Comparison(compared, _flat(RunConfig()))
    if html is not None:
        try:
            comparison.write_page(Path(html))
        except OSError as error:
            raise ConfigError(f"{html} cannot be written ({error.strerror}); choose another path.") from None
    width = shutil.get_terminal_size().columns
    click.echo(json.dumps(comparison.as_json()) if as_json else comparison.text(width))


@runs.command("clean")
@click.argument("names", nargs=-1)
@_FOLDER
@click.option("--force", "-f", is_flag=True, help="Remove; without it, only list what would be removed.")
@click.option("--rolled-back", is_flag=True, help="Also the records that restarts undid (rolled_back/).")
@click.option(
    "--all", "complete", multiple=True, metavar="NAME", help="A run to remove with its journal and weights."
)
@_JSON
def clean_command(
    names: tuple[str, ...],
    output_dir: str,
    force: bool,
    rolled_back: bool,
    complete: tuple[str, ...],
    as_json: bool,
) -> None:
    """List what the runs NAMES, or all runs, do not need; with --force, remove it.

    That is: checkpoints but the newest and the best (metric_for_best_model), those that are damaged or were
    not completed, and runs that ended before they measured anything. Journals and final weights stay, unless
    --all names the run. A run in progress is never touched.
    """
    require("cleaning", *TRAINING)
    from agentrl.run.cleaning import Scope, clean

    scope = Scope.ROLLED_BACK if rolled_back else Scope.UNNEEDED
    scopes = {_trained(name, output_dir): scope for name in names}
    scopes |= {_trained(name, output_dir): Scope.EVERYTHING for name in complete}
    scopes = scopes or dict.fromkeys(_idle_folders(output_dir), scope)
    report = partial(click.echo, err=True)
    items = [
        item
        for folder, folder_scope in scopes.items()
        for item in clean(folder, folder_scope, dry_run=not force, on_event=report)
    ]
    num_bytes = sum(item.num_bytes for item in items)
    if as_json:
        listed = [{**item._asdict(), "path": str(item.path)} for item in items]
        click.echo(json.dumps({"removed": force, "bytes": num_bytes, "items": listed}))
        return
    for item in items:
        click.echo(f"{size_text(item.num_bytes):>10}  {item.path}  ({item.reason})")
    noun = "folder" if len(items) == 1 else "folders"
    outcome = "removed" if force else "to remove; add --force to do it" if items else "to remove"
    click.echo(f"{size_text(num_bytes):>10}  {len(items)} {noun} {outcome}.")


def _idle_folders(output_dir: str) -> Iterator[Path]:
    """The runs of a folder; those in progress are left out, and reported."""
    for folder in _folders(output_dir):
        if is_locked(folder):
            click.echo(f"{folder} is in progress and stays as it is.", err=True)
        else:
            yield folder


def run_folder(name: str, output_dir: str) -> Path:
    """The folder of a run, given by its name or its path.

    Raises:
        ConfigError: there is no run.
    """
    for path in (Path(output_dir) / name, Path(name)):
        if (path / "config.toml").exists():
            return path
    raise ConfigError(f"{output_dir} holds no run `{name}`; `agentrl runs list` lists them.")


def _trained(name: str, output_dir: str) -> Path:
    """The folder of a run of `agentrl train` or `agentrl sft`, given by its name or its path.

    Raises:
        ConfigError: there is no run, or one of another command.
    """
    folder = run_folder(name, output_dir)
    if (command := _other_command(folder)) is not None:
        raise ConfigError(f"{folder} is of `agentrl {command}`, no run; `agentrl view {folder}` shows it.")
    return folder


def _other_command(folder: Path) -> str | None:
    """The command that wrote the config.toml of a folder; None = it is a run's, or cannot be read."""
    try:
        sections = read_written(folder / "config.toml").keys()
    except (ConfigError, RecordError):
        return None
    # A run has settings of an evaluation, too.
    others = () if "run" in sections else ("gateway", "eval")
    return next((command for command in others if command in sections), None)


def _readable(folders: Sequence[Path]) -> Iterator[dict[str, JSON]]:
    """The facts of runs; one whose folder cannot be read is reported, and hides none of the others."""
    for folder in folders:
        try:
            facts = facts_of(folder)
        except (OSError, ValueError, ConfigError) as error:
            click.echo(visible(f"{folder} is left out: {error}"), err=True)
        else:
            yield facts


def _any_folder(name: str, output_dir: str) -> Path:
    """The folder of a run or of a benchmark, by its name or its path."""
    return next((path for path in (Path(output_dir) / name, Path(name)) if path.is_dir()), Path(name))


def facts_of(folder: Path) -> dict[str, JSON]:
    """What a run's folder says of it.

    Raises:
        ConfigError: its config.toml is of another version.
    """
    config, command = read_run(folder), command_of(folder)
    rows = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    step = max((int(row["step"] or 0) for row in rows), default=0)
    evaluated = [row for row in rows if any(name.startswith("eval/") for name in row)]
    # The record of an evaluation comes after that of its step, or of later ones.
    of_step = [row for row in rows if row["step"] == step]
    newest = ([row for row in of_step if "rollout/raw_reward" in row or "train/loss" in row] or of_step)[-1:]
    return {
        "name": folder.name,
        "command": command,
        "env": config.env.env if command == "train" or "env" in config.env.model_fields_set else None,
        "state": state_of(folder),
        "step": step,
        "of": config.rollout.num_rollout if command == "train" else None,
        "attempts": len(attempts(folder)),
        "checkpoints": [path.name for path in sorted((folder / "checkpoints").glob("step_*"))],
        "diagnoses": [str(diagnosis) for diagnosis in read_diagnoses(folder)],
        "metrics": {name: value for row in newest for name, value in row.items() if name != "step"},
        "evaluation": {name: value for row in evaluated[-1:] for name, value in row.items()},
    }


def _lines(facts: Mapping[str, JSON]) -> Iterator[str]:
    """Facts one below the other; those that hold several have a line for each."""
    width = max(map(len, facts), default=0) + 2
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from (key, *(f"  {line}" for line in _lines(value)))
        elif isinstance(value, list):
            yield from (
                f"{name:<{width}}{item}" for name, item in zip(chain([key], repeat("")), value, strict=False)
            )
        elif value is not None:
            yield f"{key:<{width}}{value if isinstance(value, bool) else figure_text(value)}"


def state_of(folder: Path) -> str:
    """Whether a run is running, and how it ended otherwise."""
    tries = attempts(folder)
    ended = tries[-1].ended if tries else "not begun"
    return "running" if is_locked(folder) else ended or "killed"


def _compared(folder: Path) -> ComparedRun:
    try:
        return ComparedRun.read(folder, _flat(read_run(folder)))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{folder} cannot be compared ({reason}); restore that file.") from None


def _flat(config: RunConfig) -> dict[str, JSON]:
    """All settings by `section.key`, but where the run is."""
    acting = effective_values(config)
    settings = {
        f"{section}.{key}": value
        for section, values in defaults(RunConfig).items()
        for key, value in {**values, **acting[section]}.items()
    }
    return {name: value for name, value in settings.items() if name not in ("run.name", "run.output_dir")}


def _folders(output_dir: str) -> list[Path]:
    """The folders of runs, the newest last."""
    configs = sorted(Path(output_dir).glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in configs if _other_command(path.parent) is None]


def _text(found: Audit) -> str:
    rows = {
        "started": f"{found.started} prompts",
        "trained": f"{found.trained}",
        **({"recorded": f"{found.recorded}"} if found.recorded else {}),
        **{f"dropped, {reason}": f"{number}" for reason, number in sorted(found.dropped.items())},
        "skipped": f"{found.skipped}",
        **({"saved, to be played again": f"{found.saved}"} if found.saved else {}),
        "ahead of the last checkpoint": f"{found.ahead}",
        **{f"rolled back, {name}": f"{number} episodes" for name, number in found.rolled_back.items()},
    }
    lines = [f"{name:<30} {value}" for name, value in rows.items()]
    return "\n".join([*lines, *(found.problems or ["Every prompt is accounted for, once."])])
