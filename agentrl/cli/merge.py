"""`agentrl merge`."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.errors import ConfigError
from agentrl.runtime.extras import TRAINING, require


@click.command("merge", cls=Command)
@click.argument("adapters")
@click.argument("out")
def merge_command(adapters: str, out: str) -> None:
    """Add the low-rank adapters in the folder ADAPTERS to their base model, and write the whole model to OUT.

    ADAPTERS is the checkpoint of a run with lora_rank, or any folder of plain LoRA that peft has saved. Its
    adapter_config.json names the folder of the base model, which stays as it is; nothing is downloaded.

        agentrl merge runs/quickstart/checkpoint models/quickstart

    OUT is an ordinary model directory for programs that read no adapters, with the dtypes of the base model.
    It must not exist, and appears whole or not at all. agentrl itself takes ADAPTERS wherever it takes a
    model: --hf-checkpoint, --model, `agentrl serve`.
    """
    require("merging adapters", *TRAINING)
    from agentrl.weights.hf.export import merge_adapters

    target = Path(out)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{out} exists already; name a new folder, or remove it.")
    merge_adapters(Path(adapters), target)
    click.echo(f"{out} holds the whole model.")
