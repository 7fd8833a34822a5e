"""`agentrl envs new`."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from agentrl.envs.scaffold import scaffold


@click.command("new")
@click.argument("name")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Where to write it; else a folder of its name."
)
def new_command(name: str, folder: Path | None) -> None:
    """Write a working package with an environment called NAME: tasks, a tool, a test, a README."""
    package = scaffold(name, folder)
    click.echo(
        f"{package.env_id} is in {package.folder}. Next:\n"
        f"  pip install -e {package.folder}\n"
        f"  agentrl envs check {package.env_id}"
    )
