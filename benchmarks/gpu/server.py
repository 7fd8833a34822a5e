"""A server that jobs share, started by the product as a run starts it; it ends with its job."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from agentrl.assembly.fleet import FleetPlan
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.launch import LocalLauncher
from agentrl.errors import ConfigError
from agentrl.processes.gpus import own_gpus
from agentrl.types import JSON
from benchmarks.gpu.job import Bench, Turn
from benchmarks.gpu.shapes import model_folder, shape_of

RUNS = "runs"
"""The argument of the server of whole runs; that of the others is a shape."""
_OF_MEMORY = 0.18
"""The share of a card that the cache of the shared server takes: a trainer has to fit beside it."""
_TOKENS_OF_RUNS = 100_000
_TINY_TOKENS = 20_000
_MAX_REQUESTS = 512
_NEVER_S = 86_400.0


async def run(bench: Bench) -> None:
    """Start a server, tell its address, and wait for the end."""
    turn = bench.turn()
    started = time.monotonic()
    fleet = await plan(bench, turn).start()
    try:
        seconds = time.monotonic() - started
        part = bench.spec.argument
        bench.row(
            f"server of {part}", f"up after {seconds:.1f} s", {"start_s": seconds}, {"start_s": seconds}
        )
        bench.tell(url=fleet.url)
        await asyncio.to_thread(bench.until_the_end)
    finally:
        await fleet.close()


def plan(bench: Bench, turn: Turn) -> FleetPlan:
    """The server on the last of the cards."""
    spec, is_of_runs = bench.spec, bench.spec.argument == RUNS
    shape = shape_of(spec.shape, tiny=spec.tiny)
    model = Path(turn.models["warm"]) if is_of_runs else model_folder(bench.folder, shape, spec.device)
    of_a_token = 2 * 2 * shape.layers * shape.kv_heads * shape.width
    tokens = _TOKENS_OF_RUNS if is_of_runs else int(_OF_MEMORY * turn.memory / of_a_token)
    arguments: dict[str, JSON] = {"max_total_tokens": _TINY_TOKENS if spec.tiny else tokens}
    if spec.device == "cuda":
        # The cache is what `max_total_tokens` says, whoever else takes memory while the server starts.
        arguments |= {"dtype": "bfloat16", "mem_fraction_static": 0.9, "max_running_requests": _MAX_REQUESTS}
    logs = bench.folder / f"server-{spec.argument}"
    logs.mkdir(parents=True, exist_ok=True)
    return FleetPlan(
        model=model,
        config=engine_config(bench, {**arguments, **spec.sglang}),
        folder=logs,
        on_event=bench.note,
        vocab_size=None if is_of_runs else shape.vocab,
        releases=is_of_runs,
        launcher=LocalLauncher([own_gpus()[-1:]] if spec.device == "cuda" else ()),
    )


def engine_config(bench: Bench, arguments: dict[str, JSON]) -> EngineConfig:
    """The settings of one server that a run would start."""
    return EngineConfig(
        engine="sglang",
        max_slots=_MAX_REQUESTS,
        rollout_num_gpus_per_engine=0 if bench.spec.device == "cpu" else 1,
        # A run that takes its memory away pauses it, and it answers no health check then.
        rollout_health_check_interval=_NEVER_S,
        sglang_python=bench.spec.python or None,
        sglang=arguments,
    )


def url_of(turn: Turn, part: str) -> str:
    """The address of the server for `part`.

    Raises:
        ConfigError: there is none.
    """
    if part not in turn.urls:
        raise ConfigError(f"there is no server of {part}, so this part is left out.")
    return turn.urls[part]
