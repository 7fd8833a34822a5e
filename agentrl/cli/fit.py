"""`agentrl fit`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Command
from agentrl.errors import ConfigError
from agentrl.processes.gpus import present_gpus
from agentrl.runtime.extras import TRAINING, require
from agentrl.types import JSON

if TYPE_CHECKING:
    from agentrl.assembly.fit import Fit, Way

_GIB = 2**30
_AGAIN = ", again"
_WIDE = 116


@click.command("fit", cls=Command)
@click.argument("what", metavar="MODEL|RUN", type=click.Path(path_type=Path))
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Number of GPUs.")
@click.option(
    "--memory", type=click.FloatRange(min=1.0), metavar="GIB", help="Of each GPU; left out, this machine's."
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    metavar="TOKENS",
    help="Tokens of the longest episode.",
)
@click.option(
    "--lora-rank", type=click.IntRange(min=1), help="Rank of the adapters; left out, the run's, or 16."
)
@click.option("--trainer", type=click.Choice(["torch", "megatron"]), help="Left out, the run's, or torch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fit_command(
    what: Path,
    *,
    gpus: int,
    memory: float | None,
    context: int,
    as_json: bool,
    **settings: str | int | None,
) -> None:
    """Tell what of a model fits on GPUs: memory by part, and the longest row.

    MODEL is a model directory, of which config.json is enough; with a RUN, a TOML file, its critic, reference
    and other settings count, too. Nothing is allocated, and no GPU is needed.

        agentrl fit models/Qwen3-4B --memory 80

    A row is one episode, or several short ones one after the other: the longest that fits bounds the context
    of an episode and max_tokens_per_gpu alike. How many episodes a server plays at once is told, too; trainer
    and server take turns (colocate = true). The operations of a step are counted on tensors without numbers,
    but for Megatron, whose activations are an estimate.
    """
    require("sizing a model", *TRAINING)
    from agentrl.assembly.fit import Cards, fit

    given: dict[str, JSON] = {name: value for name, value in settings.items() if value is not None}
    if not what.exists():
        raise ConfigError(f"{what} does not exist; name a model directory or a run file.")
    report = fit(what, Cards(gpus, _memory(memory)), given, context, _tried)
    if as_json:
        click.echo(json.dumps(_facts(report)))
        return
    _show(report, Console(highlight=False))


def _memory(gib: float | None) -> int:
    """The memory of a GPU (bytes).

    Raises:
        ConfigError: none is given, and there is none here.
    """
    if gib is not None:
        return int(gib * _GIB)
    sizes = [gpu.memory for gpu in present_gpus() if gpu.memory]
    if not sizes:
        raise ConfigError("this machine shows no GPU; say how large one is, such as --memory 80.")
    return min(sizes)


def _tried(ways: Sequence[Mapping[str, JSON]]) -> Iterator[Mapping[str, JSON]]:
    # On stderr, since stdout has the report.
    console = Console(stderr=True)
    yield from track(ways, "counting", console=console, transient=True, disable=not console.is_terminal)


def _facts(report: Fit) -> dict[str, JSON]:
    """The report as JSON; keys that end in `_bytes` are bytes."""
    return {
        "gpus": report.cards.number,
        "gpu_bytes": report.cards.memory,
        "available_bytes": report.available,
        "tokens": report.tokens,
        "max_position_embeddings": report.context,
        "ways": [
            {
                "settings": dict(way.settings),
                **{f"{name}_bytes": size for name, size in way.memory._asdict().items() if size},
                "total_bytes": way.memory.total,
                "fits": way.memory.total <= report.available,
                "longest_row_tokens": way.longest,
                "tokens_per_s": way.speed,
                "is_fastest": way is report.fastest,
            }
            for way in report.ways
        ],
        "cpu_optimizer_bytes": report.on_cpu,
        "server": {
            "cache_tokens": report.cached,
            "episodes_at_once": report.cached // report.tokens,
            "total_bytes": report.server.total,
        },
    }


def _show(report: Fit, console: Console) -> None:
    cards = report.cards
    number = "one GPU" if cards.number == 1 else f"each of {cards.number} GPUs"
    title = f"{number} of {_gib(cards.memory)} GiB, and a row of {report.tokens:,} tokens (GiB)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    has_speed = any(way.speed for way in report.ways)
    for name in ("weights", "gradients", "optimizer", "rows", "total", "longest row"):
        table.add_column(name, justify="right")
    if has_speed:
        table.add_column("tokens/s", justify="right")
    for way in report.ways:
        part = way.memory
        rows = part.activations + part.dispatch + part.logits
        sizes = (part.weights, part.gradients, part.optimizer, rows, part.total)
        longest = f"{way.longest:,}" if way.longest else "none"
        fits = part.total <= report.available
        speed = [f"{'*' * (way is report.fastest)}{way.speed:,.0f}"] if way.speed else []
        table.add_row(Text(_name(way)), *map(_gib, sizes), longest, *speed, style="" if fits else "dim")
    # Narrower ones would cut its numbers.
    if has_speed:
        console.width = max(console.width, _WIDE)
    console.print(table)
    for line in _notes(report):
        console.print(Text(line), soft_wrap=True)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"


def _name(way: Way) -> str:
    trainer, layout = way.config.trainer, way.config.layout
    if trainer.trainer == "megatron":
        again, sizes = layout.recompute_granularity is not None, layout
        name = f"TP {sizes.tensor_model_parallel_size}, PP {sizes.pipeline_model_parallel_size}"
        if sizes.decoder_last_pipeline_num_layers is not None:
            name += f" (last {sizes.decoder_last_pipeline_num_layers})"
        if sizes.expert_ranks > 1:
            name += f", EP {sizes.expert_model_parallel_size}"
            name += f" x {sizes.expert_tensor_ranks}" * (sizes.expert_tensor_ranks > 1)
    else:
        again, name = trainer.gradient_checkpointing, "full"
        if trainer.lora_rank is not None:
            name = f"LoRA {trainer.lora_rank}"
    return name + _AGAIN * again


def _notes(report: Fit) -> Iterator[str]:
    is_torch = report.ways[0].config.trainer.trainer == "torch"
    again = "gradient_checkpointing = true" if is_torch else "recompute_granularity = full"
    yield f"again: layers are computed a second time ({again})."
    if report.ways[0].speed:
        yield (
            "tokens/s: of all GPUs together in training, by a rough model of H100s; *: the fastest that fits."
        )
    own = _gib(report.ways[0].memory.runtime)
    yield (
        f"The trainer has {_gib(report.available)} GiB in its turn: a twentieth of a GPU stays free, and the "
        f"server keeps its context. Its own context ({own} GiB) is in the total."
    )
    if report.on_cpu:
        yield f"The optimizers of a machine take up to {_gib(report.on_cpu)} GiB of the CPU's memory."
    if report.cached < report.tokens:
        yield f"A server on one GPU has no room for an episode of {report.tokens:,} tokens; give it several."
    else:
        yield (
            f"A server on one GPU has a cache of {report.cached:,} tokens in its turn: "
            f"{report.cached // report.tokens:,} episodes of {report.tokens:,} tokens at once."
        )
    if report.context is not None and any(way.longest > report.context for way in report.ways):
        yield f"The model reads at most {report.context:,} tokens; longer rows hold several episodes."
