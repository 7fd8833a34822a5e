"""An update of a server's weights by every transport of the product: GB/s, and how long it stands still."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import NamedTuple, get_args

from agentrl.assembly.fleet import FleetPlan
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.fleet import Fleet
from agentrl.errors import AgentRLError
from agentrl.trainer.ranks import RankTrainer
from agentrl.types import JSON
from benchmarks.compare import figures_of
from benchmarks.gpu.job import Bench, Turn
from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.server import url_of
from benchmarks.gpu.shapes import bytes_of_model, model_folder, shape_of
from benchmarks.gpu.timing import repeated

_ROWS = 4096
_LEAST_S = 8.0
_LONGEST_S = 60.0


class Target(NamedTuple):
    """A server that gets weights. name: of the transport. model: they are its. folder: of what is written."""

    name: str
    url: str
    model: Path
    folder: Path


def names() -> list[str]:
    """The transports of whole weights that a run may choose; `lora` sends adapters, to servers of its own."""
    annotation = EngineConfig.model_fields["update_weights_transport"].annotation
    choices = [get_args(choice) for choice in get_args(annotation)]
    return [str(name) for name in itertools.chain.from_iterable(choices) if name != "lora"]


async def run(bench: Bench) -> None:
    """A row for each transport, from one rank to one server."""
    spec = bench.spec
    ranks = Ranks(1, bench.folder)
    turn = bench.turn()
    shape = shape_of(spec.shape, tiny=spec.tiny)
    model = model_folder(bench.folder, shape, spec.device)
    url = url_of(turn, shape.name)
    async with ranks.training(model, rows=_ROWS, bf16=spec.device == "cuda") as trainer:
        bench.quiet()
        # Not in the job's folder, which may lie in memory.
        with tempfile.TemporaryDirectory(prefix="agentrl-weights-") as written:
            for name in names():
                target = Target(name, url, model, Path(written) / name)
                await _row_or_why(bench, turn, trainer, target)


async def _row_or_why(bench: Bench, turn: Turn, trainer: RankTrainer, target: Target) -> None:
    if bench.left_s < (0 if bench.spec.tiny else _LEAST_S):
        bench.note(f"no time for {target.name}")
        return
    try:
        async with asyncio.timeout(min(_LONGEST_S, max(bench.left_s - 2, 1))):
            await _row(bench, turn, trainer, target)
    except (AgentRLError, TimeoutError) as error:
        bench.row(target.name, f"failed: {error or 'no time'}", {"error": str(error)})


async def _row(bench: Bench, turn: Turn, trainer: RankTrainer, target: Target) -> None:
    fleet = await _joined(bench, target)
    versions, still = itertools.count(1), list[float]()

    async def publish() -> None:
        await trainer.publish(fleet.sink, version=next(versions))
        still.append(fleet.sink.standstill_s)

    try:
        timed = await repeated(publish, bench.left_s / len(names()))
    finally:
        await fleet.close()
    size = bytes_of_model(target.model)
    rate, stands = size / timed.median, figures_of(still[1:]).median
    copies = f", {rate / turn.copy:.2%} of a copy on the card" if turn.copy else ""
    line = (
        f"{rate / 1e9:.2f} GB/s{copies}: {timed.median:.3f} s for {size / 1e9:.2f} GB, the server stands "
        f"still for {stands * 1e3:.0f} ms ({timed})"
    )
    figures: dict[str, JSON] = {
        "bytes": size,
        "gb_per_s": rate / 1e9,
        "standstill_s": [*still[1:]],
        "ms_a_gb": stands * 1e12 / size,
        **timed.figures(),
    }
    bench.row(target.name, line, figures, {"gb_per_s": rate / 1e9, "standstill_s": stands})


async def _joined(bench: Bench, target: Target) -> Fleet:
    """The server, which has the weights of the directory by this transport: so it is warmed up, too."""
    target.folder.mkdir()
    config = EngineConfig.model_validate(
        {"engine": "sglang", "sglang_url": target.url, "update_weights_transport": target.name}
    )
    plan = FleetPlan(
        model=target.model,
        config=config,
        folder=target.folder,
        dtype="float32" if bench.spec.device == "cpu" else "bfloat16",
        on_event=bench.note,
        vocab_size=shape_of(bench.spec.shape, tiny=bench.spec.tiny).vocab,
    )
    return await plan.join()
