"""`agentrl envs new`."""

from __future__ import annotations

import shlex
from pathlib import Path

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.envs.scaffold import KINDS, scaffold

_KINDS = "; ".join(f"{name}: {kind.description}" for name, kind in KINDS.items())


@click.command("new", cls=Command)
@click.argument("name")
@click.option("--kind", default="tool", show_default=True, type=click.Choice(list(KINDS)), help=f"{_KINDS}.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Where to write it; else a folder of its name."
)
def new_command(name: str, kind: str, folder: Path | None) -> None:
    """Write a working package with an environment called NAME: tasks, a reward, tests, a README.

    The package does not depend on agentrl by name, since a package index may hold another project of that
    name. Its README installs agentrl from where the running one was installed.
    """
    package = scaffold(name, folder, kind)
    click.echo(
        f"{package.env_id} is in {package.folder}. Next, as its README.md shows:\n"
        f"  cd {shlex.quote(str(package.folder))}\n"
        "  python -m pip install -e '.[dev]'\n"
        f"  agentrl envs check {package.env_id}\n"
        "  python -m pytest"
    )
