"""What our client costs: CPU time of a request, and throughput over a bare httpx2 that sends the same bodies.

The bare client keeps a connection for every request that runs, reads the reply, parses its JSON, and nothing
else. The first server answers at once, with the same tokens: this one hurts, for all that is measured is the
client (and the server's little, on another core). The second is a real SGLang, which has every prompt in its
cache.
"""

from __future__ import annotations

import json
import statistics
import uuid

import httpx2
import numpy as np

from agentrl.engine.sglang import SGLangPolicy, wire
from agentrl.errors import EngineError
from agentrl.protocols import Sampling
from agentrl.types import JSON
from benchmarks.compare import Spent, rates_of, timed
from benchmarks.engine import tiny_model
from benchmarks.engines.place import Canned, Place, Row, at_once, listed, save, seeded, up, vocab_size
from benchmarks.engines.settings import Client

OURS, BARE = "client", "bare"
_OK = 200


async def bench(place: Place) -> list[Row]:
    """A row for the server that costs little, and one for SGLang."""
    work, network = place.settings.client, seeded(tiny_model)
    folder = save(network, place.folder / "client" / "model")
    async with up(Canned(folder.parent, work.new)) as url:
        place.on_event(f"a server that costs little is up at {url}")
        rows = [await measured("a server that costs little", url, work.requests, place)]
    async with place.sglang(folder, max_total_tokens=work.cache) as servers:
        rows.append(await measured("SGLang", servers.url, work.real_requests, place))
    return rows


async def measured(server: str, url: str, requests: int, place: Place) -> Row:
    """The row of one server."""
    work = place.settings.client
    size, rule = vocab_size(seeded(tiny_model)), Sampling(work.new)
    drawn = np.random.default_rng(0).integers(1, size, (work.concurrency, work.prompt)).tolist()
    prompts = [drawn[number % len(drawn)] for number in range(requests)]
    policy = SGLangPolicy(url, max_concurrency=work.concurrency, vocab_size=size)
    limits = httpx2.Limits(max_connections=work.concurrency, max_keepalive_connections=work.concurrency)
    async with httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:
        bodies = [wire.generate_body(uuid.uuid4().hex, prompt, rule) for prompt in prompts]

        async def ours(number: int) -> None:
            await policy.generate(prompts[number], rule, session=str(number))

        async def bare(number: int) -> None:
            headers = {"content-type": "application/json", wire.ROUTING_KEY: str(number)}
            reply = await http.post(f"{url}/generate", content=bodies[number], headers=headers)
            if reply.status_code != _OK:
                raise EngineError(f"{url} {wire.refusal(reply.status_code, reply.content)}")
            json.loads(reply.content)

        try:
            spent = await timed(
                {
                    OURS: lambda: at_once(ours, requests, work.concurrency),
                    BARE: lambda: at_once(bare, requests, work.concurrency),
                },
                repeats=place.settings.repeats,
            )
        finally:
            await policy.close()
    row = _told(f"client, {work.concurrency} at once, {server}", spent, requests, work)
    place.on_event(f"{row.name}: {row.line}")
    return row


def _told(name: str, spent: dict[str, list[Spent]], requests: int, work: Client) -> Row:
    found = rates_of(spent, requests, "requests_per_s")
    cpu_ms = {side: [1e3 * one.cpu_s / requests for one in of] for side, of in spent.items()}
    ours_ms, bare_ms = (statistics.median(cpu_ms[side]) for side in (OURS, BARE))
    ratio = found.medians[OURS] / found.medians[BARE]
    line = (
        f"{ours_ms:.2f} ms of CPU a request (bare {bare_ms:.2f}, target {work.cpu_ms}), {ratio:.2f}x the "
        f"bare throughput ({found.medians[OURS]:.0f} against {found.medians[BARE]:.0f} requests/s, target "
        f"{work.ratio}x)"
    )
    figures: dict[str, JSON] = {
        "ratio": ratio,
        "target_ratio": work.ratio,
        "cpu_ms": ours_ms,
        "target_cpu_ms": work.cpu_ms,
        "sides": found.told,
        "cpu_ms_a_request": _by_side(cpu_ms),
    }
    return Row(name, line, figures)


def _by_side(figures: dict[str, list[float]]) -> dict[str, JSON]:
    return {side: listed(of) for side, of in figures.items()}
