"""Recording gateways before one chat endpoint that costs nothing: this package's and agent-lightning's.

A process asks for conversations of four requests, 64 at once. What a request costs is the CPU time of the
gateway's process: from the socket to the record and back. The record is that of a chat endpoint: messages.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.sglang.launch.listener import free_ports
from agentrl.errors import UserError
from agentrl.types import JSON
from benchmarks.compare import Figures, figures_of, interleaved
from benchmarks.gateway import Clients, client_process
from benchmarks.machine import interpreter_versions, machine
from benchmarks.peers import on_agentlightning
from benchmarks.peers.sides import ROOT, InstantEndpoint, Program, Side
from benchmarks.sections import as_json

_OWN, _PEER = "agentrl", "agent-lightning"
_PACKAGES = ("agentlightning", "litellm", "opentelemetry-sdk", "uvicorn")
_REST_S, _REST = 1.0, 0.02
"""A gateway is at rest where it takes less than this share of a core for so long (seconds)."""
_PROXY = Path(on_agentlightning.__file__).parent / "proxy.py"
# Without a key it starts only where that is allowed; and it would ask the network for prices.
_SETTINGS = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@dataclass(frozen=True, slots=True)
class GatewaysLoad:
    """episodes: at once (count). calls: of the tool in each. payload: characters of a result.

    rounds: of all episodes in a repeat.
    """

    episodes: int = 64
    calls: int = 3
    payload: int = 40
    rounds: int = 2
    repeats: int = 5

    @property
    def requests(self) -> int:
        """In a repeat (count)."""
        return self.episodes * (self.calls + 1) * self.rounds


class _Spent(NamedTuple):
    """Of a request. cpu_ms: of the gateway's processes."""

    cpu_ms: float
    wall_ms: float


def bench_gateways(
    python: Path | None, *, load: GatewaysLoad | None = None, on_event: Callable[[str], None] = print
) -> dict[str, JSON]:
    """Ask both sides in turns.

    python: the interpreter that agent-lightning is installed for; None = this package alone.

    Returns:
        summary: medians. sides: every repeat, medians and spreads. settings: of load and machine.

    Raises:
        UserError: the interpreter has no agent-lightning, or a gateway ended.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        return asyncio.run(_bench(python, Path(folder), load or GatewaysLoad(), on_event))


async def _bench(
    python: Path | None, folder: Path, load: GatewaysLoad, on_event: Callable[[str], None]
) -> dict[str, JSON]:
    remedy = "name an interpreter that agent-lightning 0.3 is installed for with --agentlightning-python."
    versions = (
        {} if python is None else await interpreter_versions(python, "agentlightning", _PACKAGES, remedy)
    )
    endpoint = InstantEndpoint(folder, load.calls)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(endpoint.stop)
        await endpoint.start()
        clients = await stack.enter_async_context(client_process())
        asked: dict[str, Callable[[], Awaitable[_Spent]]] = {}
        own = await stack.enter_async_context(_own(folder, endpoint.url).started())
        names = count()
        asked[_OWN] = partial(_asked, own, partial(_own_urls, own, names), clients, load)
        if python is not None:
            port = free_ports(1)[0]
            peer = await stack.enter_async_context(_peer(python, folder, endpoint.url, port).started())
            asked[_PEER] = partial(_asked, peer, partial(_peer_urls, peer), clients, load)
        on_event(f"{', '.join(asked)}: {load.repeats} repeats of {load.requests:,} requests")
        runs = await interleaved(asked, repeats=load.repeats)
        if python is not None:
            await _check_recorded(peer, (load.repeats + 1) * load.requests)
    figures = {
        side: {name: figures_of([getattr(run, name) for run in spent]) for name in _Spent._fields}
        for side, spent in runs.items()
    }
    return {
        "summary": _summary(figures),
        "sides": {side: {name: one._asdict() for name, one in of.items()} for side, of in figures.items()},
        "settings": {"load": as_json(asdict(load)), "machine": machine(), "agent-lightning": versions},
    }


def _summary(figures: dict[str, dict[str, Figures]]) -> dict[str, JSON]:
    summary: dict[str, JSON] = {
        side: {name: round(one.median, 3) for name, one in of.items()} for side, of in figures.items()
    }
    if _PEER in figures:
        summary["ratio of CPU"] = round(figures[_PEER]["cpu_ms"].median / figures[_OWN]["cpu_ms"].median, 2)
    return summary


def _own(folder: Path, upstream: str) -> Program:
    settings: dict[str, JSON] = {"upstream": f"{upstream}/v1", "folder": str(folder / "recorded")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.peers.recorder"]
    return Program(_OWN, command, settings, environment, folder / "own.log")


def _peer(python: Path, folder: Path, upstream: str, port: int) -> Program:
    settings: dict[str, JSON] = {"upstream": f"{upstream}/v1", "port": port}
    command = [str(python), str(_PROXY)]
    return Program(_PEER, command, settings, {**os.environ, **_SETTINGS}, folder / "peer.log")


async def _own_urls(side: Side, names: count[int], number: int) -> list[str]:
    return [f"{side.resolved['url']}/episode-{next(names)}/v1" for _ in range(number)]


async def _peer_urls(side: Side, number: int) -> list[str]:
    urls = (await side.ask(f"{number}"))["urls"]
    assert isinstance(urls, list)
    return [str(url) for url in urls]


async def _asked(
    side: Side, urls_of: Callable[[int], Awaitable[list[str]]], clients: Clients, load: GatewaysLoad
) -> _Spent:
    urls = await urls_of(load.episodes * load.rounds)
    cpu_s, began = side.cpu_s, time.perf_counter()
    for start in range(0, len(urls), load.episodes):
        some = urls[start : start + load.episodes]
        await asyncio.gather(*(clients.run(url, "key", load.payload) for url in some))
    wall_s = time.perf_counter() - began
    await _at_rest(side)
    return _Spent(1e3 * (side.cpu_s - cpu_s) / load.requests, 1e3 * wall_s / load.requests)


async def _at_rest(side: Side) -> None:
    """What is recorded after a reply counts, too."""
    before = -1.0
    while (cpu_s := side.cpu_s) - before > _REST * _REST_S:
        before = cpu_s
        await asyncio.sleep(_REST_S)


async def _check_recorded(peer: Side, requests: int) -> None:
    recorded = (await peer.ask(""))["recorded"]
    if recorded != requests:
        known = "install a version of litellm that it knows"
        raise UserError(f"{_PEER} recorded {recorded} of {requests} requests; {known}.")
