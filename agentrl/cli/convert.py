"""`agentrl convert`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import rich_click as click

from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.trainer.megatron.files.convert import Converted


@click.command("convert")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("target", metavar="TARGET", type=click.Path(path_type=Path))
@click.option(
    "--tensor-model-parallel-size",
    type=click.IntRange(min=1),
    help="To Megatron: ranks that share every matrix (count) [default: 1]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Cast every value to it; bfloat16 rounds [default: as SOURCE has them]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
def convert_command(
    source: Path,
    target: Path,
    tensor_model_parallel_size: int | None,
    dtype: Literal["float32", "bfloat16"] | None,
    as_json: bool,
) -> None:
    """Turn a Hugging Face directory into a Megatron directory, or one of these back.

    Which way is what SOURCE is: a Megatron directory holds a megatron.json. The tokenizer and all other files
    come along. TARGET must not be there yet; it appears whole or not at all.

    One layer is in memory at a time. Without --dtype no bit of a weight changes: there and back gives the
    same checksum.

    agentrl convert Qwen3-8B Qwen3-8B-tp4 --tensor-model-parallel-size 4

    agentrl convert Qwen3-8B-tp4 Qwen3-8B-again
    """
    from agentrl.trainer.megatron.files.convert import Wish, convert
    from agentrl.view.console import RunConsole

    console = RunConsole(quiet=as_json)

    @contextmanager
    def stage(total: int) -> Iterator[Callable[[], None]]:
        with console.stage(f"converting {source}", total) as bar:
            yield bar.advance

    started = time.perf_counter()
    try:
        done = convert(source, target, Wish(tensor_model_parallel_size, dtype), stage)
    except OSError as error:
        raise UserError(f"{target} was not written: {error}; mend that and convert again.") from error
    if not as_json:
        console.line(_sentence(target, done))
        return
    paths = {"source": str(source), "target": str(target)}
    click.echo(json.dumps({**paths, **done._asdict(), "seconds": time.perf_counter() - started}))


def _sentence(target: Path, done: Converted) -> str:
    cast = f" (cast from {done.cast_from})" if done.cast_from else ""
    return (
        f"{target}: {done.direction}, {done.tensors} tensors, {done.bytes:,} bytes of {done.dtype}{cast}, "
        f"checksum {done.checksum}"
    )
