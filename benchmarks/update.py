"""How long an engine stands still for new weights, as a share of the update (`trainer.publish`).

A torch trainer in a rank of its own publishes to engines that are never idle: callers send one request after
the other. Sides take turns, repeat by repeat:

    embedded             in a process of its own. Standstill: the time between its forward passes, while it
                         has requests
    embedded, inline     in the process of the event loop, where the buckets arrive; the same measure
    SGLang               one server on the CPU. Standstill: from the end of the first request that is
                         interrupted until they are sent again
    SGLang, all paused   the same server, and the baseline: nothing is staged, so it is paused all the time

Loads: a model whose weights take most of an update; and, adverse, one so small that what an update costs
whatever it carries (control calls, the swap, requests that are sent again) is nearly all of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.messages import Open
from agentrl.engine.embedded.process import EngineProcess, ProcessEngine
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Delivery
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.losses import PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import WORKER, TorchPlan
from agentrl.types import JSON
from agentrl.types.seams import RunningPolicy, Sampling, WeightSink
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import num_parameters
from benchmarks.compare import figures_of, interleaved
from benchmarks.machine import interpreter_versions, machine
from benchmarks.models import save, seeded, small_model, tiny_model

EMBEDDED, INLINE, SGLANG, PAUSED = "embedded", "embedded, inline", "SGLang", "SGLang, all paused"


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A model, and its requests. callers: requests at a time (count). prompt, new: tokens of each.

    Requests are so long that an update meets them in the middle.
    """

    name: str
    make: Callable[[], PreTrainedModel] = field(repr=False)
    callers: int
    prompt: int = 32
    new: int = 512

    @property
    def context_len(self) -> int:
        """Tokens of a request (count)."""
        return self.prompt + self.new


@dataclass(frozen=True, slots=True)
class UpdateBench:
    """target: of the standstill's share."""

    loads: tuple[RequestLoad, ...] = (
        RequestLoad("135M", small_model, 4),
        RequestLoad("tiny", tiny_model, 16),
    )
    repeats: int = 5
    target: float = 0.1


_Row = Mapping[str, float]
_LOAD_FIELDS = ("name", "callers", "prompt", "new")
_SMALLEST_VOCABULARY = 200
_PATIENCE_S = 3600.0
_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
_REMEDY = (
    "name the interpreter that it is installed for with --sglang-python, or install one with "
    "`make sglang-cpu`."
)


class _Sink(WeightSink, Protocol):
    standstill_s: float


class _Side(NamedTuple):
    """An engine that serves, and the sink of its weights."""

    policy: RunningPolicy
    sink: _Sink


class _Unstaged(SharedMemory):
    """Writes and verifies nothing before the servers are paused."""

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """See `Transport`."""
        del servers, delivery
        yield


def bench_update(
    python: Path | None,
    *,
    only: str | None = None,
    bench: UpdateBench | None = None,
    on_event: Callable[[str], None] = print,
) -> dict[str, JSON]:
    """Publish to every side in turns.

    python: the interpreter that SGLang is installed for; None = the embedded engine alone. only: the name of
    a load; None = all of them.

    Returns:
        summary: a line for each side. rows: seconds, standstill and share of every update. settings: of runs
        and machine.

    Raises:
        UserError: the interpreter has no SGLang.
        EngineError: a server did not start, or refused weights.
    """
    bench = bench or UpdateBench()
    loads = tuple(load for load in bench.loads if only in (None, load.name))
    return asyncio.run(_bench(python, replace(bench, loads=loads), on_event))


async def _bench(python: Path | None, bench: UpdateBench, on_event: Callable[[str], None]) -> dict[str, JSON]:
    torch.set_num_threads(1)
    versions: dict[str, JSON] = {}
    runs: dict[str, list[_Row]] = {}
    parameters: dict[str, JSON] = {}
    with TemporaryDirectory(prefix="agentrl-update-") as temporary:
        if python is not None:
            python = python.absolute()
            versions = await interpreter_versions(python, "SGLang", _PACKAGES, _REMEDY)
        for number, load in enumerate(bench.loads):
            model = save(seeded(load.make), Path(temporary) / str(number) / "model")
            parameters[load.name] = num_parameters(open_config(model))
            rows = await _bench_load(model, load, python, bench, on_event)
            runs |= {f"{load.name}: {side}": side_rows for side, side_rows in rows.items()}
    return {
        "summary": {name: _line(rows, bench.target) for name, rows in runs.items()},
        "rows": {name: [dict(row) for row in rows] for name, rows in runs.items()},
        "shares": {name: figures_of([row["share"] for row in rows])._asdict() for name, rows in runs.items()},
        "settings": {
            "loads": [{name: getattr(load, name) for name in _LOAD_FIELDS} for load in bench.loads],
            "repeats": bench.repeats,
            "target": bench.target,
            "parameters": parameters,
            "dtype": "float32",
            "threads": 1,
            "warm_up": "one update of each side",
            "baseline": None if python is None else PAUSED,
            "machine": machine(),
            "sglang": versions,
        },
    }


async def _bench_load(
    model: Path,
    load: RequestLoad,
    python: Path | None,
    bench: UpdateBench,
    on_event: Callable[[str], None],
) -> dict[str, list[_Row]]:
    async with AsyncExitStack() as stack:
        sides = {
            EMBEDDED: await stack.enter_async_context(_embedded(model, load)),
            INLINE: await stack.enter_async_context(_inline(model, load)),
        }
        if python is not None:
            sides |= await stack.enter_async_context(_sglang(model, python, load, on_event))
        trainer = await stack.enter_async_context(_trainer(model))
        numbers = itertools.count(1)

        async def update(name: str, side: _Side) -> _Row:
            row = await _update(trainer, side, load, numbers)
            on_event(f"{load.name}, {name}: {row['standstill_s']:.3f} s of {row['seconds']:.2f} s")
            return row

        return await interleaved(
            {name: partial(update, name, side) for name, side in sides.items()}, repeats=bench.repeats
        )


@asynccontextmanager
async def _embedded(model: Path, load: RequestLoad) -> AsyncIterator[_Side]:
    process = EngineProcess(model.parent / "embedded")
    try:
        model_opened = Open(str(model), load.callers + 1, load.context_len, False, 1, None)
        engine = await ProcessEngine.opened(process, model_opened)
        yield _Side(engine, engine.sink)
        await engine.close()
    finally:
        process.end()


@asynccontextmanager
async def _inline(model: Path, load: RequestLoad) -> AsyncIterator[_Side]:
    slots = load.callers + 1
    engine = EmbeddedEngine.from_pretrained(model, max_slots=slots, max_context_len=load.context_len)
    yield _Side(engine, engine.sink)
    await engine.close()


@asynccontextmanager
async def _sglang(
    model: Path, python: Path, load: RequestLoad, on_event: Callable[[str], None]
) -> AsyncIterator[dict[str, _Side]]:
    """Two sides that share a server on the CPU, of one thread."""
    settings = ServerSettings(
        model=model,
        log_folder=model.parent,
        device="cpu",
        arguments={"custom_weight_loader": [LOADER], "dtype": "float32"},
        python=python,
        python_path=(LOADER_FOLDER,),
        environment={"OMP_NUM_THREADS": "1"},
    )
    async with Servers(ServerReplicas(settings), on_event=on_event) as servers:
        policy = SGLangPolicy(servers.url, max_concurrency=load.callers + 1, timeout_s=_PATIENCE_S)
        server = Server(servers.url)
        transports = {SGLANG: SharedMemory(), PAUSED: _Unstaged()}
        sinks: dict[str, SGLangSink] = {}

        @asynccontextmanager
        async def hold(name: str) -> AsyncIterator[float]:
            async with policy.held(server.abort_all) as still_since:
                yield still_since
                policy.salt = sinks[name].salt

        for name, transport in transports.items():
            sinks[name] = SGLangSink(transport, lambda: [server], partial(hold, name), _lost)
        yield {name: _Side(policy, sink) for name, sink in sinks.items()}
        await policy.close()
        for sink in sinks.values():
            await sink.close()
        await server.close()


def _lost(server: Server, error: EngineError) -> None:
    """Raise: a failed update raises by itself, but a failure to resume afterwards does not."""
    raise EngineError(f"{server.url} was lost: {error}")


@asynccontextmanager
async def _trainer(model: Path) -> AsyncIterator[RankTrainer]:
    policy = Learning(PolicyLoss(), TrainerConfig(lr=1e-5), 1)
    plan = TorchPlan(policy=policy, models={"old": str(model)}, num_threads=1)
    ranks = Processes(1, model.parent / "ranks", preloaded=WORKER)
    try:
        yield await RankTrainer.started(ranks, plan)
    finally:
        await ranks.run(ranks.close)


async def _update(trainer: RankTrainer, side: _Side, load: RequestLoad, numbers: Iterator[int]) -> _Row:
    """Publish once, while requests run."""
    version, stopped = next(numbers), asyncio.Event()
    prompt = np.random.default_rng(version).integers(1, _SMALLEST_VOCABULARY, load.prompt).tolist()

    async def request(session: str, new: int) -> None:
        await side.policy.generate(prompt, Sampling(new), session=session)
        await side.policy.close_session(session)

    async def call(caller: int) -> None:
        for number in itertools.count():
            if stopped.is_set():
                return
            await request(f"{version}-{caller}-{number}", load.new)

    callers = [asyncio.create_task(call(caller)) for caller in range(load.callers)]
    try:
        # It is sent after the first requests of the callers: these run when it ends.
        await request(f"{version}-last", 1)
        began = time.perf_counter()
        await trainer.publish(side.sink, version=version)
        seconds = time.perf_counter() - began
    finally:
        stopped.set()
        await side.policy.abort()
        await asyncio.gather(*callers)
    still_s = side.sink.standstill_s
    return {"seconds": seconds, "standstill_s": still_s, "share": still_s / seconds}


def _line(rows: Sequence[_Row], target: float) -> str:
    share, seconds, still_s = (
        figures_of([row[name] for row in rows]) for name in ("share", "seconds", "standstill_s")
    )
    return (
        f"stands still for {share.median:.1%} of an update (spread {share.spread:.0%}, target "
        f"{target:.0%}): {still_s.median:.3f} s of {seconds.median:.2f} s"
    )
