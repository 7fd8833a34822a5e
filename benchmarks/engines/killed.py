"""What the loss of a server costs: two SGLang servers under steady requests, one of them killed with SIGKILL.

The servers, their router and their watchers are those that a run starts (`engine = "sglang"`), and have been
given weights, which a server that comes back has to get before it takes requests. Requests are asked all the
time, so that it strikes in mid-generation; what had been sent to the dead server is asked for again elsewhere
(`sampled_again`), so that nobody who asked is told of it. One that fails all the same is `lost`.
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

from agentrl.assembly.policy import Place as Whereabouts
from agentrl.assembly.policy import build_engine
from agentrl.checkpoints.source import open_source
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.fleet import Fleet
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import Sampling
from agentrl.types import JSON, Limits
from agentrl.weights import checksum, manifest_of, named_weights, pack_buckets
from benchmarks.engine import tiny_model
from benchmarks.engines.place import Place, Row, listed, save, seeded, vocab_size
from benchmarks.engines.settings import Killed

_BUCKET_BYTES = 64 << 20
_LOOK_S = 0.02
_GUARD = b"guard.py"


@dataclass(slots=True)
class Tally:
    """Requests of one repeat (counts)."""

    asked: int = 0
    answered: int = 0
    lost: int = 0


async def bench(place: Place) -> list[Row]:
    """One row, over two servers that are started for it.

    Raises:
        ConfigError: the interpreter has no SGLang, or a server does not come up.
    """
    work, network = place.settings.killed, seeded(tiny_model)
    config = EngineConfig(
        engine="sglang",
        rollout_num_engines=2,
        sglang_python=str(place.python),
        max_slots=work.concurrency,
    )
    model = open_source(save(network, place.folder / "killed-model"))
    where = Whereabouts(place.folder / "killed", place.on_event)
    fleet = await build_engine(model, config, Limits(), where)
    try:
        assert isinstance(fleet, Fleet), "servers of our own are one"
        await publish(fleet, network)
        return await measured(fleet, vocab_size(network), place)
    finally:
        await fleet.close()


async def publish(fleet: Fleet, network: PreTrainedModel) -> None:
    """Give all servers the model's weights as version 1."""
    weights = list(named_weights(network))
    async with fleet.sink.begin(manifest_of(weights), 1) as transaction:
        for bucket in pack_buckets(weights, _BUCKET_BYTES):
            await transaction.put(bucket)
        await transaction.commit(checksum(weights))


async def measured(fleet: Fleet, size: int, place: Place) -> list[Row]:
    """One row. size: of the vocabulary (tokens).

    Raises:
        EngineUnavailableError: a server did not come back in time.
    """
    work = place.settings.killed
    repeats = [await _repeat(fleet, size, number, work) for number in range(work.repeats)]
    back_s = [cast(float, one["back_s"]) for one in repeats]
    median = statistics.median(back_s)
    asked, answered, lost, again = (
        sum(cast(int, one[what]) for one in repeats)
        for what in ("asked", "answered", "lost", "sampled_again")
    )
    line = (
        f"back after {median:.1f} s ({min(back_s):.1f} to {max(back_s):.1f}); of {asked} requests {answered} "
        f"answered, {lost} lost, {again} sampled again"
    )
    figures: dict[str, JSON] = {
        "back_s": {"seconds": listed(back_s), "median": median},
        "repeats": [*repeats],
    }
    row = Row(f"one of {len(fleet.processes)} servers killed", line, figures)
    place.on_event(f"{row.name}: {row.line}")
    return [row]


async def _repeat(fleet: Fleet, size: int, number: int, work: Killed) -> dict[str, JSON]:
    """Strike once, under steady requests; what it came to."""
    tally, before = Tally(), dict(fleet.counts)
    over = asyncio.Event()
    prompt = np.random.default_rng(number).integers(1, size, work.prompt).tolist()

    async def ask(caller: int) -> None:
        while not over.is_set():
            tally.asked += 1
            # A new session each: one that was moved to the other server would stay there.
            session = f"{number}-{caller}-{tally.asked}"
            try:
                await fleet.generate(prompt, Sampling(work.new), session=session)
            except EngineError:
                tally.lost += 1
            else:
                tally.answered += 1

    callers = [asyncio.create_task(ask(caller)) for caller in range(work.concurrency)]
    try:
        async with asyncio.timeout(work.within_s):
            await _until(lambda: tally.answered >= work.steady)
            back_s = await _struck(fleet, number % len(fleet.processes))
            enough = tally.answered + work.steady
            await _until(lambda: tally.answered >= enough)
            over.set()
            await asyncio.gather(*callers)
    except TimeoutError:
        raise EngineUnavailableError(
            f"a server that was killed, or what was asked meanwhile, was not back in {work.within_s:g} s; "
            "see the logs of the servers."
        ) from None
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    counts = fleet.counts
    return {
        "back_s": back_s,
        "asked": tally.asked,
        "answered": tally.answered,
        "lost": tally.lost,
        "sampled_again": counts["lost"] - before["lost"],
        "sent_again_untouched": counts["retries"] - before["retries"],
    }


async def _struck(fleet: Fleet, number: int) -> float:
    """Kill a server; gives the seconds until it takes requests again, with its weights."""
    before, process = len(fleet.incidents), fleet.processes[number]
    victim, began = server_at(int(process.url.rpartition(":")[2])), time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    await _until(lambda: any(one.server == process.name for one in fleet.incidents[before:]))
    return time.perf_counter() - began


def server_at(port: int) -> int:
    """The process that was started to listen at a port: the one that names it, and is not its guard.

    Raises:
        EngineUnavailableError: there is none.
    """
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if str(port).encode() in words and not any(word.endswith(_GUARD) for word in words):
                return int(entry.name)
    raise EngineUnavailableError(f"no server that listens at port {port} runs.")


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(_LOOK_S)
