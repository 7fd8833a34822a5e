"""`python -m benchmarks`: the project's own benchmarks, as a command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, TypeVar, get_args

import rich_click as click

from agentrl.cli import run
from agentrl.cli.flags import config_flags, flag_values
from agentrl.config import Section, by_section, parse
from agentrl.types import JSON
from benchmarks.config import AsyncBench, AsyncPart, QuickstartBench
from benchmarks.sections import words_of

_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
_TELL: Final = partial(click.echo, err=True)
_Command = TypeVar("_Command", bound=Callable[..., None])


def _only(help: str) -> Callable[[_Command], _Command]:
    """The flag with which some sections are chosen."""
    return click.option("--only", default="", metavar="NAMES", help=f"{help}; none = all.")


def _interpreter(package: str, of: str, default: str | None) -> Callable[[_Command], _Command]:
    """The flag that names another interpreter. of: what it is, in words. default: None = no such package."""
    variable = f"AGENTRL_{package.upper()}_PYTHON"
    otherwise = f"no {package}" if default is None else "the running one"
    return click.option(
        f"--{package}-python",
        "python",
        envvar=variable,
        default=default,
        metavar="PATH",
        help=f"Interpreter {of}; left out, {variable}, or {otherwise}.",
    )


_SGLANG: Final = "that SGLang is installed for"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The project's own benchmarks: each compares its sides in one run and prints figures.

    `python -m benchmarks envs` prints a summary; `--json` adds settings, versions and every
    run. docs/benchmarks.md shows the last output of each command. Start them from the project's root, on
    an otherwise idle machine; `make bench` runs all of them.
    """


_PLAIN: Final = {
    "embedded": "The embedded engine against transformers' generate: tokens a second, of the same requests.",
    "generator": "Turns a CPU-second of up to 10,000 episodes at once, on an engine that costs nothing.",
    "players": "What processes that play gain: turns a second of environments that compute, in one or two.",
    "envs": "The cost of the episode loop: episodes a second with it and without it, side by side.",
    "gateway": "The cost of the recording gateway: CPU time of a request, and the first word of a stream.",
    "openenv": "Sessions at once of a served environment that waits: how many are served, and their time.",
    "tasks": "How long the machine of a task takes to start: repositories, and tasks in Harbor's format.",
    "python": "The cost of the sandbox: calls a second of the Python tool, against a process for every call.",
}
"""Benchmarks without settings, each `bench_NAME` in benchmarks/NAME.py, and what they measure."""


def _add(name: str, help: str) -> None:
    @cli.command(name, help=help)
    @_JSON
    def command(as_json: bool) -> None:
        # Imported late: each imports what it measures.
        _print(getattr(import_module(f"benchmarks.{name}"), f"bench_{name}")(), as_json)


for _name, _help in _PLAIN.items():
    _add(_name, _help)


class _Quickstart(Section):
    bench: QuickstartBench = QuickstartBench()


@config_flags(_Quickstart)
@cli.command("quickstart")
@_JSON
def quickstart_command(as_json: bool, **flags: str | bool | None) -> None:
    """How well an agent learns: over seeds, on held-out tasks, against two controls."""
    from benchmarks.quickstart import bench_quickstart

    values = by_section(_Quickstart, flag_values(flags, _Quickstart))
    _print(bench_quickstart(parse(_Quickstart, values, source="the flags").bench), as_json)


class _Async(Section):
    bench: AsyncBench = AsyncBench()


@config_flags(_Async)
@cli.command("async")
@_JSON
@click.argument("part", type=click.Choice(get_args(AsyncPart)), required=False)
def async_command(as_json: bool, part: AsyncPart | None, **flags: str | bool | None) -> None:
    """What it gains to play groups while others are trained (`max_staleness` above 0); one part, or all.

    \b
    speedup    playing and training take equal time: steps/s against synchronous runs (8 min)
    table      max_staleness 0, 1, 2, 4 x corrections: steps/s and held-out success (15 min a call)
    cheap      an adverse case, where playing is cheap: steps/s against synchronous runs (5 min)
    long-tail  long-tailed lengths: groups/s against waiting for all episodes (8 min)
    wall       HopSearch to a held-out success of 0.90: wall time against synchronous runs (15 min a call)

    Times are those of two idle cores. Engine and trainer have one thread each, the run itself a third, unless
    a side has another number. Ctrl-C ends a call at any time; finished runs of table and wall are read,
    not repeated, by the next one.
    """
    from benchmarks.asynchronous.everything import bench_async

    values = by_section(_Async, flag_values(flags, _Async))
    bench = parse(_Async, values, source="the flags").bench
    only = () if part is None else (part,)
    _print(bench_async(bench, only=only, on_event=_TELL), as_json)


@cli.command("update")
@_JSON
@click.argument("load", type=click.Choice(("135M", "tiny")), required=False)
@_interpreter("sglang", _SGLANG, None)
def update_command(as_json: bool, load: str | None, python: str | None) -> None:
    """How long an engine with requests stands still for new weights, as a share of the update.

    The torch trainer publishes 135M parameters, and those of a tiny model (adverse), to the embedded engine
    and to SGLang on the CPU.
    """
    from benchmarks.update import bench_update

    path = None if python is None else Path(python)
    _print(bench_update(path, only=load, on_event=_TELL), as_json)


@cli.command("peers")
@_JSON
@_only("Loads to play, e.g. few,long")
@_interpreter("verifiers", "of verifiers 0.4 and uv", sys.executable)
def peers_command(as_json: bool, only: str, python: str) -> None:
    """Episodes on a chat endpoint that costs nothing, side by side with verifiers: rates, CPU, memory.

    Loads: single, few, many, most (16, 64, 256 episodes at once), long. It starts processes, and stops them.
    """
    from benchmarks.peers.everything import bench_peers

    _print(bench_peers(Path(python), only=words_of(only), on_event=_TELL), as_json)


@cli.command("gateways")
@_JSON
@_interpreter("agentlightning", "of agent-lightning 0.3", None)
def gateways_command(as_json: bool, python: str | None) -> None:
    """Recording gateways before a chat endpoint that costs nothing: CPU time of a request, beside a peer's.

    The peer is agent-lightning's proxy, in an environment of its own.
    """
    from benchmarks.peers.gateways import bench_gateways

    path = None if python is None else Path(python).absolute()
    _print(bench_gateways(path, on_event=_TELL), as_json)


@cli.command("trainer")
@_JSON
@_only("Sections to run, e.g. packed,bare")
@_interpreter("trl", "of TRL 1.16", None)
def trainer_command(as_json: bool, only: str, python: str | None) -> None:
    """The torch trainer beside TRL, padded batches and a bare loop: tokens a second; memory of scores.

    \b
    memory   scores of 32k tokens x 150k ids: in chunks, against all logits
    packed   long-tailed samples: rows, against batches that are padded
    bare     samples of one length: a whole step, against the passes and the optimizer
    step     a whole step with sampling, against TRL's
    ragged   an update of the same long-tailed rows, against TRL's

    The last two need TRL, in an environment of its own.
    """
    from benchmarks.trainer.everything import bench_trainer

    path = None if python is None else Path(python).absolute()
    _print(bench_trainer(path, only=words_of(only), on_event=_TELL), as_json)


@cli.command("gpu")
@_JSON
@click.option("--parts", default="", metavar="NAMES", help="Parts to run, e.g. trainers,runs; none = all.")
@click.option("--shapes", default="", metavar="NAMES", help="Shapes, of 0.6B,1.7B,4B; none = all.")
@click.option(
    "--trainers",
    multiple=True,
    metavar="VARIANTS",
    help='Variants of trainers, e.g. "0.6B:rows=8192 0.6B:transformers 4B"; none = the usual ones.',
)
@click.option("--seconds", default=1800.0, show_default=True, help="Most that all parts may take.")
@click.option("--ranks", type=click.IntRange(1), default=None, help="Ranks of trainers; none = one a GPU.")
@click.option("--episodes", default="256,1024", show_default=True, help="Episodes at once, of the generator.")
@click.option("--sglang", multiple=True, metavar="KEY=VALUE", help="Arguments of SGLang's servers.")
@_interpreter("sglang", _SGLANG, "")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="For models and logs; none = a temporary one."
)
@click.option("--save", is_flag=True, help="Write the figures that are the best so far.")
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    help="Best figures; none = this card's, where there are any.",
)
@click.option("--tiny", is_flag=True, help="Tiny shapes on the CPU, to try the benchmark itself.")
def gpu_command(as_json: bool, **options: object) -> None:
    """The GPUs of this machine: trainers, weights, generator and whole runs, each figure as it is known.

    \b
    hw          matrix products and copies of the card
    trainers    update and score: ours, transformers on the same rows; the longest kernels
    transports  new weights for a server: GB/s, standstill, by every transport
    generator   our generator against a raw client of the same server
    runs        whole steps side by side, colocated, asynchronous
    layer       a pass through one layer of Qwen3-30B-A3B, forward and backward
    agree       log-probabilities of the same tokens by SGLang, Megatron and transformers

    A variant is SHAPE[:SETTING=VALUE,..] with any setting of the trainer and of Megatron's layout, rows,
    recompute, samples, ranks or layers, and with `torch`, `transformers` or `kernels`. With --json each row
    is a line, and the last line is everything. The exit code is 1 where a figure is more than 5% worse than
    the best of this card (benchmarks/baselines), or a part failed.
    """
    from benchmarks.gpu.command import run_gpu

    sys.exit(run_gpu(as_json, **options))


def _print(result: dict[str, JSON], as_json: bool) -> None:
    click.echo(json.dumps(result) if as_json else json.dumps(result["summary"], indent=2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one benchmark. Bad input is one sentence on stderr and exit code 2."""
    run(cli, arguments, name="python -m benchmarks")


if __name__ == "__main__":
    main()
