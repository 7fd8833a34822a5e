"""The cost of losing a server: two SGLang servers under a steady load, one of them killed with SIGKILL.

The servers, their router and their watchers are those that a run starts (`engine = "sglang"`). They have
received a version of weights, which a restarted server must load before it accepts requests. The load never
pauses, so that the kill hits requests in mid-generation; these are sent to the other server again
(`sampled_again`), and their callers see no error. A request that fails all the same is `lost`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from transformers import PreTrainedModel

from agentrl.assembly.policy import EngineSetup, build_engine
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.fleet import Fleet
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.types import JSON, Limits
from agentrl.types.seams import Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, named_weights, pack_buckets
from agentrl.weights.hf.source import open_source
from benchmarks.engines.context import EngineContext
from benchmarks.engines.settings import KillLoad
from benchmarks.models import save, seeded, tiny_model, vocab_size
from benchmarks.sections import ResultRow

_BUCKET_BYTES = 64 << 20
_POLL_S = 0.02
_GUARD = b"guard.py"


@dataclass(slots=True)
class Tally:
    """Requests of one repeat (counts)."""

    sent: int = 0
    answered: int = 0
    lost: int = 0


async def bench(context: EngineContext) -> list[ResultRow]:
    """One row, over two servers that are started for it.

    Raises:
        ConfigError: the interpreter has no SGLang, or a server does not start.
    """
    load, network = context.settings.killed, seeded(tiny_model)
    config = EngineConfig(
        engine="sglang",
        rollout_num_engines=2,
        sglang_python=str(context.python),
        max_slots=load.concurrency,
    )
    model = open_source(save(network, context.folder / "killed-model"))
    setup = EngineSetup(context.folder / "killed", context.on_event)
    fleet = await build_engine(model, config, Limits(), setup)
    try:
        assert isinstance(fleet, Fleet), "servers that a run starts are a Fleet"
        await publish(fleet, network)
        return await measured(fleet, vocab_size(network), context)
    finally:
        await fleet.close()


async def publish(fleet: Fleet, network: PreTrainedModel) -> None:
    """Publish the model's weights as version 1 to all servers."""
    weights = list(named_weights(network))
    async with fleet.sink.begin(manifest_of(weights), 1) as transaction:
        for bucket in pack_buckets(weights, _BUCKET_BYTES):
            await transaction.put(bucket)
        await transaction.commit(checksum(weights))


async def measured(fleet: Fleet, size: int, context: EngineContext) -> list[ResultRow]:
    """One row. size: of the vocabulary (tokens).

    Raises:
        EngineUnavailableError: a server did not recover in time.
    """
    load = context.settings.killed
    repeats = [await _repeat(fleet, size, number, load) for number in range(load.repeats)]
    back_s = [cast(float, repeat["back_s"]) for repeat in repeats]
    median = statistics.median(back_s)
    sent, answered, lost, again = (
        sum(cast(int, repeat[key]) for repeat in repeats)
        for key in ("sent", "answered", "lost", "sampled_again")
    )
    line = (
        f"back after {median:.1f} s ({min(back_s):.1f} to {max(back_s):.1f}); of {sent} requests {answered} "
        f"answered, {lost} lost, {again} sampled again"
    )
    figures: dict[str, JSON] = {
        "back_s": {"seconds": [*back_s], "median": median},
        "repeats": [*repeats],
    }
    row = ResultRow(f"one of {len(fleet.processes)} servers killed", line, figures)
    context.on_event(f"{row.name}: {row.line}")
    return [row]


async def _repeat(fleet: Fleet, size: int, number: int, load: KillLoad) -> dict[str, JSON]:
    """Kill a server once under a steady load; returns the figures."""
    tally, before = Tally(), dict(fleet.counts)
    stopped = asyncio.Event()
    prompt = np.random.default_rng(number).integers(1, size, load.prompt).tolist()

    async def send_requests(caller: int) -> None:
        while not stopped.is_set():
            tally.sent += 1
            # Every request has a new session: one that moved to the other server would stay there.
            session = f"{number}-{caller}-{tally.sent}"
            try:
                await fleet.generate(prompt, Sampling(load.new), session=session)
            except EngineError:
                tally.lost += 1
            else:
                tally.answered += 1

    callers = [asyncio.create_task(send_requests(caller)) for caller in range(load.concurrency)]
    try:
        async with asyncio.timeout(load.within_s):
            await _until(lambda: tally.answered >= load.steady)
            back_s = await _kill(fleet, number % len(fleet.processes))
            target = tally.answered + load.steady
            await _until(lambda: tally.answered >= target)
            stopped.set()
            await asyncio.gather(*callers)
    except TimeoutError:
        raise EngineUnavailableError(
            f"a killed server, or the requests meanwhile, did not recover in {load.within_s:g} s; "
            "see the logs of the servers."
        ) from None
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    counts = fleet.counts
    return {
        "back_s": back_s,
        "sent": tally.sent,
        "answered": tally.answered,
        "lost": tally.lost,
        "sampled_again": counts["lost"] - before["lost"],
        "sent_again_untouched": counts["retries"] - before["retries"],
    }


async def _kill(fleet: Fleet, number: int) -> float:
    """Kill a server; returns the seconds until it accepts requests again, with its weights."""
    before, process = len(fleet.incidents), fleet.processes[number]
    pid, began = server_at(int(process.url.rpartition(":")[2])), time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await _until(lambda: any(incident.server == process.name for incident in fleet.incidents[before:]))
    return time.perf_counter() - began


def server_at(port: int) -> int:
    """The process of the server at a port: its command line contains the port, and it is not the guard.

    Raises:
        EngineUnavailableError: there is none.
    """
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if str(port).encode() in command and not any(part.endswith(_GUARD) for part in command):
                return int(entry.name)
    raise EngineUnavailableError(f"no server that listens at port {port} runs.")


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(_POLL_S)
