"""`agentrl envs`."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Command, CommandGroup
from agentrl.cli.flags import read_json_object
from agentrl.envs import AnyEnv, Env, ScriptedAgent, find, play, tasks_of
from agentrl.envs.base import GROUPS
from agentrl.envs.catalog import CatalogEntry, by_family, catalog, markdown, needs_of, summary
from agentrl.envs.check import AttackReport, CheckReport, attack_env, check_env, check_package
from agentrl.envs.export import FORMATS, export_env
from agentrl.envs.harbor.env import survey
from agentrl.envs.registry import gymnasium_id, matching
from agentrl.envs.scaffold import KINDS, NewPackage, scaffold
from agentrl.errors import ConfigError, UserError
from agentrl.records import lines
from agentrl.runtime.event_loop import blocking
from agentrl.runtime.files import write_bytes
from agentrl.runtime.interrupts import run_until_signal
from agentrl.tools.secrets import with_secrets
from agentrl.types import JSON
from agentrl.view.formats.messages import messages_in
from agentrl.view.scores import time_text

# `agentrl envs check`.
FAILED = 1
LONG_S = 5.0
"""After that a check without a terminal says what it does (seconds)."""
HARBOR = "agentrl.envs.harbor:HarborTasks"
_STYLES = {"error": "bold red", "warning": "yellow"}
_OUTCOMES = {"fail": "bold red", "warn": "yellow"}


env_kwargs_option = click.option(
    "--env-kwargs",
    default="{}",
    metavar="JSON",
    help="Arguments of the environment's constructor (a JSON object) [default: {}]",
)


@click.command("check", cls=Command)
@click.argument("env_id")
@env_kwargs_option
@click.option(
    "--n", default=32, show_default=True, help="Tasks that the expert and random play are measured on."
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices of the check.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="Write the report of RFC 008 in OpenEnv's schema, beside it the whole one and a badge.",
)
def check_command(
    env_id: str, env_kwargs: str, n: int, seed: int, as_json: bool, report_file: Path | None
) -> None:
    """Check whether an environment is worth training on.

    The expert must reach its score; silence, chance and cheats must not. Leaving an episode must not pay more
    than losing it. ENV_ID may also be a folder of OpenEnv, whose manifest, Dockerfile and files are checked,
    too; the environment that it serves is played where `agentrl envs export` has written it. Exit code 1:
    there are errors.
    """
    if report_file is not None and not report_file.absolute().parent.is_dir():
        raise ConfigError(
            f"--report {report_file}: its folder does not exist; make it, or choose another path."
        )
    kwargs = read_json_object("--env-kwargs", env_kwargs)
    if Path(env_id).is_dir():
        if kwargs:
            raise ConfigError(
                "--env-kwargs has no effect with a folder, which has its own arguments; drop it."
            )
        check = partial(check_package, Path(env_id), n=n, seed=seed)
    else:
        check = partial(check_env, env_id, env_kwargs=kwargs, n=n, seed=seed)
    if as_json:
        report = check()
        click.echo(json.dumps(report.to_json()))
    else:
        with _shown(Console(stderr=True)) as shown:
            report = check(progress=shown)
        _show(report, Console())
    if report_file is not None:
        report.write(report_file)
    if report_file is not None and not as_json:
        whole, badge = (report_file.with_suffix(suffix) for suffix in (".agentrl.json", ".svg"))
        click.echo(f"{report_file} has the report in OpenEnv's schema, {whole} the whole one. For a README:")
        click.echo(report.badge_line(badge.name))
    if not report.ok:
        sys.exit(FAILED)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows which probe runs, and for how long: in a line of a terminal, else in lines once it takes long."""
    columns = (SpinnerColumn(), TextColumn("checking: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, begun_s = bar.add_task("", total=None), time.monotonic()

        def show(what: str) -> None:
            bar.update(task, description=what)
            elapsed_s = time.monotonic() - begun_s
            if not console.is_terminal and elapsed_s >= LONG_S:
                click.echo(f"checking: {what} (after {time_text(elapsed_s)})", err=True)

        yield show


def _show(report: CheckReport, console: Console) -> None:
    figures = Table(title=report.env_id, show_header=False)
    for name, value in report.figures.items():
        figures.add_row(name, f"{value:.4g}")
    if report.figures:
        console.print(figures)
    for outcome in report.of_package:
        style = _OUTCOMES.get(outcome.status)
        for line in outcome.evidence if style else ():
            console.print(f"[{style}]{outcome.status}[/] {outcome.check.id}: {escape(line)}", highlight=False)
    for finding in report.findings:
        style = _STYLES[finding.severity]
        console.print(
            f"[{style}]{finding.severity}[/] {finding.code}: {escape(finding.text)}", highlight=False
        )
    errors = _counted(len(report.errors), "error")
    warnings = _counted(len(report.findings) - len(report.errors), "warning")
    verdict = "passed" if report.ok else "failed"
    failed = sum(outcome.status == "fail" for outcome in report.of_package)
    of_folder = f", {_counted(failed, 'check')} of the folder failed" if failed else ""
    console.print(f"{report.env_id} {verdict}: {errors}, {warnings}{of_folder}.", highlight=False)
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(report.counts.items()))
    console.print(f"Checks of RFC 008: {statuses}.", highlight=False)


def _counted(count: int, noun: str, nouns: str = "") -> str:
    return f"{count} {noun if count == 1 else nouns or f'{noun}s'}"


# `agentrl envs attack`.


@click.command("attack", cls=Command)
@click.argument("env_id")
@env_kwargs_option
@click.option("--budget", default=600, show_default=True, help="Most episodes that are played.")
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices of the attack.")
@click.option("--model", metavar="DIR", help="Hugging Face model directory that plays beside the strategies.")
@click.option("--n", default=32, show_default=True, help="Episodes of the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def attack_command(env_id: str, env_kwargs: str, model: str | None, as_json: bool, **numbers: int) -> None:
    """Try to win an environment without solving it.

    A search over cheap strategies: constant answers, the most frequent ones of training, words of the
    verifier, pieces of the prompt and of observations, one call again and again, calls and then an answer,
    length alone. The best of them play tasks that the search has not seen. Exit code 1: some are paid more
    than chance_score, or of some all episodes fail, so that nothing is known of what they earn.
    """
    kwargs = read_json_object("--env-kwargs", env_kwargs)
    budget, n, seed = (numbers[name] for name in ("budget", "n", "seed"))
    # First: that there is no such model is told before anything is played.
    of_model = None if model is None else _played_by(model, env_id, kwargs, n, seed)
    with _bar(Console(stderr=True), budget) as advance:
        report = attack_env(env_id, env_kwargs=kwargs, budget=budget, seed=seed, progress=advance)
    if as_json:
        click.echo(json.dumps({**report.to_json(), "model": of_model}))
    else:
        _show_attack(report, Console())
        if of_model is not None:
            click.echo(f"{model} earned {of_model:.3f} in {n} episodes.")
    if report.paid or report.failed:
        sys.exit(FAILED)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar of the episodes that are played, on a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda played, what: bar.update(task, advance=played, description=escape(what))


def _played_by(model: str, env_id: str, kwargs: dict[str, JSON], n: int, seed: int) -> float:
    """The mean score of a model (over `n` episodes)."""
    from agentrl.evaluation.model import evaluate

    return evaluate(env_id, model, quiet=True, n=n, seed=seed, env_kwargs=kwargs).mean


def _show_attack(report: AttackReport, console: Console) -> None:
    table = Table("strategy", "mean", "99.9% interval", "episodes", "", title=report.env_id)
    for attempt in report.attempts:
        # Rounding may leave a bound a little below 0.
        bounds = f"{round(attempt.low, 3) + 0.0:.3f} to {attempt.high:.3f}"
        paid = Text("paid", style="bold red") if attempt.paid else Text("")
        table.add_row(escape(attempt.strategy), f"{attempt.mean:.3f}", bounds, str(attempt.episodes), paid)
    console.print(table)
    tried = f"{report.tried} of {report.strategies} strategies in {report.episodes} episodes"
    found = f"{_counted(len(report.paid), 'strategy', 'strategies')} paid more than"
    console.print(f"{tried}: {found} chance_score = {report.chance_score:g}.", highlight=False)
    if report.failures:
        lost = f"{report.failures} of {report.episodes} episodes failed and are in no mean"
        whole = f", among them all of {_counted(len(report.failed), 'strategy', 'strategies')}"
        unknown = f"{whole}, of which nothing is known until it is mended" if report.failed else ""
        console.print(escape(f"{lost}{unknown}; the first: {report.failure}"), highlight=False)


# `agentrl envs new`.
_SHOWN = 3
_CHECKED = 16
_KINDS = "; ".join(f"{name}: {kind.description}" for name, kind in KINDS.items())


@click.command("new", cls=Command)
@click.argument("name")
@click.option("--kind", default="tool", show_default=True, type=click.Choice(list(KINDS)), help=f"{_KINDS}.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Where to write it; else a folder of its name."
)
def new_command(name: str, kind: str, folder: Path | None) -> None:
    """Write a working package with an environment called NAME: tasks, a reward, tests, a README.

    With it come the report of `agentrl envs check` with its badge, and episodes of its expert as messages.
    The package does not depend on agentrl by name, since a package index may hold another project of that
    name. Its README installs agentrl from where the running one was installed.
    """
    new = scaffold(name, folder, kind)
    env_class = _imported(new)
    report = check_env(env_class, n=_CHECKED)
    report.write(new.folder / "report.json")
    rollouts = b"".join(
        lines.to_line(row) for row in blocking(lambda: run_until_signal(_played(env_class())))
    )
    write_bytes(new.folder / "rollouts.jsonl", rollouts)
    click.echo(
        f"{new.env_id} is in {new.folder}; its check {report.summary}. Next, as its README.md shows:\n"
        f"  cd {shlex.quote(str(new.folder))}\n"
        "  python -m pip install -e '.[dev]'\n"
        f"  agentrl envs check {new.env_id}\n"
        "  python -m pytest"
    )


def _imported(new: NewPackage) -> type[Env]:
    """The class, from the sources that were just written; the package is not imported by its name."""
    sources = str(new.folder.resolve() / "src")
    sys.path.insert(0, sources)
    try:
        env_class = getattr(importlib.import_module(new.package), new.env_class)
    finally:
        sys.path.remove(sources)
        for module in [*sys.modules]:
            if module.partition(".")[0] == new.package:
                del sys.modules[module]
    if not (isinstance(env_class, type) and issubclass(env_class, Env)):
        raise UserError(f"{new.package}.{new.env_class} is no environment; is a template damaged?")
    return env_class


async def _played(env: Env) -> list[dict[str, JSON]]:
    """Episodes of the expert, as messages."""
    rows: list[dict[str, JSON]] = []
    for task in env.tasks("train")[:_SHOWN]:
        episode = await play(env, ScriptedAgent(env.expert(task)), task, seed=0)
        (trajectory,) = episode.trajectories
        messages: list[JSON] = [*messages_in(trajectory)]
        rows.append({"messages": messages, "reward": episode.total_of(), "task": task.id})
    await env.close()
    return rows


# `agentrl envs export`.


@click.command("export", cls=Command)
@click.argument("env_id")
@env_kwargs_option
@click.option(
    "--format",
    "form",
    required=True,
    type=click.Choice(list(FORMATS)),
    help="verifiers: a package with a taskset, for 0.4, and `load_environment`, for 0.3; "
    "nemo-gym: a resources server, for 0.4; "
    "openenv: a folder that `openenv push` takes, for 0.10; ors: a server of the Open Reward Standard, "
    "with openreward 0.1.",
)
@click.option(
    "--out", "folder", required=True, type=click.Path(path_type=Path), help="The folder, which is made."
)
@click.option(
    "--rows", type=click.IntRange(min=1), help="Tasks in the data of nemo-gym (count)  [default: 5]."
)
def export_command(env_id: str, env_kwargs: str, form: str, folder: Path, rows: int | None) -> None:
    """Write an environment as a package of another library, and say what is lost.

    The package is a thin file that imports agentrl and the environment: both are installed where it is
    played. Secrets among the arguments are names of environment variables, "$NAME".
    """
    if rows is not None and form != "nemo-gym":
        raise UserError(f"--rows is for nemo-gym, whose package has data; leave it out with --format {form}.")
    kwargs = read_json_object("--env-kwargs", env_kwargs)
    written = export_env(env_id, kwargs, form, folder, rows=rows or 5)
    click.echo(f"{env_id} is in {folder} as {written.package} for {form}: {', '.join(written.files)}.")
    for sentence in written.lost:
        click.echo(f"  {sentence}")


_PLAIN = (str, int, float, bool)
_MAX_TOOLS = 5


@click.group(cls=CommandGroup)
def envs() -> None:
    """The environments that are installed."""


envs.add_command(check_command)
envs.add_command(attack_command)
envs.add_command(new_command)
envs.add_command(export_command)


@envs.command("list")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, every environment on its own.")
@click.option("--all", "each", is_flag=True, help="List the environments of a family one by one.")
def list_command(pattern: str, as_json: bool, each: bool) -> None:
    """List the registered environments by group: what each needs, its scores and its limits.

    PATTERN: ids to list, such as 'ReasoningGym-*'; left out, all. A family, many environments of one class,
    is one row, until a pattern or --all lists them. Or a folder of tasks in Harbor's format: its tasks, and
    what each of them needs that only an image has.
    """
    if Path(pattern).is_dir():
        _list_tasks(pattern, as_json=as_json)
        return
    entries = catalog(matching(pattern))
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries]))
        return
    shown = entries if each or pattern != "*" else by_family(entries)
    console = Console(highlight=False)
    for group, rows in groupby(shown, key=lambda entry: entry.group):
        console.print(Text(f"\n{GROUPS.get(group, group)}", style="bold"))
        for row in rows:
            console.print(Padding(_line(row), (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(row.error or row.description), (0, 0, 0, 6), expand=False))
    console.print("\nNone that ships needs the network. Extras in red are not installed.")


def _list_tasks(folder: str, *, as_json: bool) -> None:
    """The tasks of a folder."""
    tasks = survey(folder)
    if as_json:
        click.echo(json.dumps([{"name": name, "refused": list(refused)} for name, refused in tasks]))
        return
    console = Console(highlight=False)
    for name, refused in tasks:
        console.print(Text(name, style="red" if refused else "cyan"))
        for reason in refused:
            console.print(Padding(Text(reason), (0, 0, 0, 4), expand=False))
    playable = sum(not refused for _, refused in tasks)
    console.print(f"\n{playable} of {len(tasks)} tasks can be played without an image, by {HARBOR}.")


@envs.command("table")
@click.argument("pattern", default="*")
def table_command(pattern: str) -> None:
    """Print the table of the guide "Environments that ship" as Markdown."""
    for line in markdown(by_family(catalog(matching(pattern)))):
        click.echo(line)


@envs.command("show")
@click.argument("env_id")
@env_kwargs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def show_command(env_id: str, env_kwargs: str, as_json: bool) -> None:
    """Show one environment: its splits, scores, tools, limits, dialect and a first task."""
    spec, kwargs = find(env_id), read_json_object("--env-kwargs", env_kwargs)
    facts = _facts(spec.described(**with_secrets(kwargs)), {**spec.kwargs, **kwargs})
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(title=escape(env_id), show_header=False)
    for name, value in facts.items():
        table.add_row(name, escape(value if isinstance(value, str) else json.dumps(value, indent=1)))
    Console().print(table)


def _line(entry: CatalogEntry) -> Text:
    """The id of an environment, or of a family with the number of its members, and its facts."""
    line = Text(entry.id, style="cyan")
    if entry.members > 1:
        line.append(f" ({entry.members})", style="default")
    facts: list[Text] = []
    if entry.has_expert and entry.expert_score is not None:
        facts.append(Text(f"expert {entry.expert_score:.3g}"))
    if entry.chance_score is not None:
        facts.append(Text(f"chance {entry.chance_score:.3g}"))
    if entry.needs:
        needs = (Text(name, style="red" if name in entry.missing else "") for name in entry.needs)
        facts.append(Text("needs ").append_text(Text(", ").join(needs)))
    if entry.tools:
        more = len(entry.tools) - _MAX_TOOLS
        names = ", ".join(entry.tools[:_MAX_TOOLS])
        facts.append(Text(f"tools {names}" + (f" and {more} more" if more > 0 else "")))
    return Text("  ").join([line, *facts])


def _facts(env: AnyEnv, kwargs: Mapping[str, object]) -> dict[str, JSON]:
    splits = {split: tasks_of(env, split) for split in env.splits}
    tasks = next((tasks for tasks in splits.values() if tasks), ())
    return {
        "id": env.id,
        "gymnasium_id": gymnasium_id(env.id),
        "possible_agents": list(env.possible_agents),
        "group": env.group,
        "needs": list(needs_of(env)),
        "has_expert": env.has_expert,
        "description": summary(type(env)),
        "kwargs": {
            name: value if isinstance(value, _PLAIN) else repr(value) for name, value in kwargs.items()
        },
        "expert_score": env.expert_score,
        "chance_score": env.chance_score,
        "splits": {split: len(tasks) for split, tasks in splits.items()},
        "tools": [{**tool._asdict(), "parameters": dict(tool.parameters)} for tool in env.tool_schemas],
        "limits": asdict(env.limits),
        "dialect": asdict(env.dialect),
        "first_task": tasks[0].prompt[-1].text if tasks and tasks[0].prompt else None,
    }
