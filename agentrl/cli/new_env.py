"""`agentrl envs new`: a package, what its check says, and episodes of its expert."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.envs import Env, ScriptedAgent, play
from agentrl.envs.check import check_env
from agentrl.envs.scaffold import KINDS, NewPackage, scaffold
from agentrl.errors import UserError
from agentrl.records import lines
from agentrl.runtime.event_loop import blocking
from agentrl.runtime.files import write_bytes
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON
from agentrl.view.formats.messages import messages_in

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
