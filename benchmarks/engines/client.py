"""The cost of the client: CPU time of a request, and throughput against plain httpx2 with the same bodies.

The plain client keeps a connection for every concurrent request, reads the reply and parses its JSON, and
does nothing else. The first server is a stub, an adverse case: only the client is measured (and the stub, on
another core). The second is a real SGLang, which has every prompt in its cache.
"""

from __future__ import annotations

import json
import statistics
import uuid

import httpx2
import numpy as np

from agentrl.engine.sglang import SGLangPolicy, wire
from agentrl.errors import EngineError
from agentrl.types import JSON
from agentrl.types.seams import Sampling
from benchmarks.compare import Duration, rates_of, timed
from benchmarks.engines.context import (
    EngineContext,
    StubServer,
    at_once,
    up,
)
from benchmarks.engines.settings import ClientLoad
from benchmarks.models import save, seeded, tiny_model, vocab_size
from benchmarks.sections import ResultRow

CLIENT, PLAIN = "client", "plain"
_OK = 200


async def bench(context: EngineContext) -> list[ResultRow]:
    """A row for the stub server, and one for SGLang."""
    load, netload = context.settings.client, seeded(tiny_model)
    folder = save(netload, context.folder / "client" / "model")
    async with up(StubServer(folder.parent, load.new)) as url:
        context.on_event(f"the stub server is up at {url}")
        rows = [await measured("a stub server", url, load.requests, context)]
    async with context.sglang(folder, max_total_tokens=load.cache) as servers:
        rows.append(await measured("SGLang", servers.url, load.real_requests, context))
    return rows


async def measured(server: str, url: str, requests: int, context: EngineContext) -> ResultRow:
    """The row of one server."""
    load = context.settings.client
    size, sampling = vocab_size(seeded(tiny_model)), Sampling(load.new)
    token_ids = np.random.default_rng(0).integers(1, size, (load.concurrency, load.prompt)).tolist()
    prompts = [token_ids[number % len(token_ids)] for number in range(requests)]
    policy = SGLangPolicy(url, max_concurrency=load.concurrency, vocab_size=size)
    policy.salt = salt = "benchmark"
    limits = httpx2.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    async with httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:
        bodies = [
            wire.generate_body(uuid.uuid4().hex, prompt, sampling, wire.Requested(salt)) for prompt in prompts
        ]

        async def client_request(number: int) -> None:
            await policy.generate(prompts[number], sampling, session=str(number))

        async def plain_request(number: int) -> None:
            headers = {"content-type": "application/json", wire.ROUTING_KEY: str(number)}
            reply = await http.post(f"{url}/generate", content=bodies[number], headers=headers)
            if reply.status_code != _OK:
                raise EngineError(f"{url} {wire.refusal(reply.status_code, reply.content)}")
            json.loads(reply.content)

        try:
            spent = await timed(
                {
                    CLIENT: lambda: at_once(client_request, requests, load.concurrency),
                    PLAIN: lambda: at_once(plain_request, requests, load.concurrency),
                },
                repeats=context.settings.repeats,
            )
        finally:
            await policy.close()
    row = _result_row(f"client, {load.concurrency} at once, {server}", spent, requests, load)
    context.on_event(f"{row.name}: {row.line}")
    return row


def _result_row(name: str, spent: dict[str, list[Duration]], requests: int, load: ClientLoad) -> ResultRow:
    throughput = rates_of(spent, requests, "requests_per_s")
    cpu_ms = {side: [1e3 * run.cpu_s / requests for run in runs] for side, runs in spent.items()}
    client_ms, plain_ms = (statistics.median(cpu_ms[side]) for side in (CLIENT, PLAIN))
    ratio = throughput.medians[CLIENT] / throughput.medians[PLAIN]
    line = (
        f"{client_ms:.2f} ms of CPU a request (plain {plain_ms:.2f}, target {load.cpu_ms}), {ratio:.2f}x the "
        f"plain throughput ({throughput.medians[CLIENT]:.0f} against {throughput.medians[PLAIN]:.0f} "
        f"requests/s, target {load.ratio}x)"
    )
    figures: dict[str, JSON] = {
        "ratio": ratio,
        "target_ratio": load.ratio,
        "cpu_ms": client_ms,
        "target_cpu_ms": load.cpu_ms,
        "sides": throughput.figures,
        "cpu_ms_a_request": {side: [*values] for side, values in cpu_ms.items()},
    }
    return ResultRow(name, line, figures)
