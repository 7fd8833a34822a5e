"""The command line of `python -m benchmarks gpu`: its options, and what it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import rich_click as click

from agentrl.errors import UserError
from agentrl.types import JSON
from benchmarks.gpu.everything import bench_gpu
from benchmarks.gpu.plan import Options
from benchmarks.sections import words_of

_NAME_WIDTH = 46


def run_gpu(as_json: bool, **options: object) -> int:
    """Run the benchmark with the options of the command line and print its figures.

    Returns:
        the exit code: 1 where a part failed, or a figure is worse than the best of this card.

    Raises:
        UserError: as `bench_gpu`, or for an option that cannot be read.
    """
    result = bench_gpu(
        options_of(options), on_row=_print_json if as_json else _print_line, on_note=_print_note
    )
    if as_json:
        click.echo(json.dumps(result))
    for title in ("left_out", "failed", "worse"):
        for sentence in cast(Sequence[str], result[title]):
            click.echo(f"{title.replace('_', ' ')}: {sentence}", err=as_json)
    return int(bool(result["failed"] or result["worse"]))


def options_of(options: Mapping[str, object]) -> Options:
    """The options, from what the command line has.

    Raises:
        UserError: `--sglang` has no value, or `--episodes` no numbers.
    """
    texts = {name: str(options[name]) for name in ("parts", "shapes", "episodes", "python")}
    return Options(
        parts=words_of(texts["parts"]),
        shapes=words_of(texts["shapes"]),
        variants=cast(Sequence[str], options["trainers"]),
        seconds=cast(float, options["seconds"]),
        tiny=bool(options["tiny"]),
        python=texts["python"] or ("" if options["tiny"] else sys.executable),
        sglang=dict(map(_argument, cast(Sequence[str], options["sglang"]))),
        ranks=cast(int | None, options["ranks"]),
        episodes=_numbers(texts["episodes"]),
        folder=cast(Path | None, options["folder"]),
        save=bool(options["save"]),
        compare=cast(Path | None, options["compare"]),
    )


def _numbers(text: str) -> list[int]:
    words = words_of(text)
    if not words or not all(word.isdecimal() and int(word) >= 8 for word in words):
        raise UserError(f"--episodes {text} are numbers of at least 8, one group; write --episodes 256,1024.")
    return [int(word) for word in words]


def _argument(text: str) -> tuple[str, JSON]:
    name, has_value, value = text.partition("=")
    if not has_value:
        raise UserError(f"--sglang {text} has no value; write --sglang {text}=VALUE.")
    try:
        parsed: JSON = json.loads(value)
    except ValueError:
        parsed = value
    return name.replace("-", "_"), parsed


def _print_json(row: Mapping[str, JSON]) -> None:
    click.echo(json.dumps(row))


def _print_line(row: Mapping[str, JSON]) -> None:
    click.echo(f"{row['part']}, {row['name']}".ljust(_NAME_WIDTH) + f" {row['line']}")


def _print_note(sentence: str) -> None:
    click.echo(sentence, err=True)
