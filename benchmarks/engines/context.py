"""The servers of the benchmark: each server is stopped when its block or this process ends."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings, Value
from agentrl.engine.sglang.launch.listener import Listener, free_ports
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.errors import EngineError
from agentrl.types import JSON
from benchmarks.engines import canned
from benchmarks.engines.settings import EngineSettings
from benchmarks.machine import interpreter_versions

SGLANG_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
SINGLE_THREADED = {"OMP_NUM_THREADS": "1"}
_SERVED_S = 120.0
_CANNED_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineContext:
    """python: the interpreter that SGLang is installed for. folder: for models and logs.

    on_event: called with a message for each step.
    """

    python: Path
    folder: Path
    settings: EngineSettings
    on_event: Callable[[str], None]

    @asynccontextmanager
    async def sglang(self, model: Path, *, count: int = 1, **arguments: Value) -> AsyncIterator[Servers]:
        """SGLang servers on the CPU, one thread each, with a router where there are several.

        Raises:
            ConfigError: the interpreter has no SGLang.
            EngineUnavailableError: a server does not start.
        """
        settings = ServerSettings(
            model=model,
            log_folder=model.parent,
            device="cpu",
            arguments={"custom_weight_loader": [LOADER], **arguments},
            python=self.python,
            python_path=(LOADER_FOLDER,),
            environment=SINGLE_THREADED,
        )
        async with Servers(ServerReplicas(settings, count=count), on_event=self.on_event) as servers:
            yield servers

    async def versions(self) -> dict[str, JSON]:
        """The versions of SGLang's interpreter and packages.

        Raises:
            ConfigError: it cannot be run, or has no SGLang.
        """
        remedy = (
            "name the interpreter that it is installed for with --sglang-python, or install one with "
            "`make sglang-cpu`."
        )
        return await interpreter_versions(self.python, "SGLang", SGLANG_PACKAGES, remedy)


class EmbeddedServer(Listener):
    """`agentrl serve` as a process of its own, one thread."""

    def __init__(self, model: Path, *, slots: int, context_len: int) -> None:
        super().__init__("agentrl-serve", free_ports(1)[0], model.parent)
        self._arguments = [str(model), "--port", str(self.port), "--num-threads", "1"]
        self._arguments += ["--max-slots", str(slots), "--max-context-len", str(context_len)]

    async def start(self) -> None:
        """See `Listener.start`."""
        command = [sys.executable, "-m", "agentrl.cli", "serve", *self._arguments]
        await self._start_process(command, {**os.environ, **SINGLE_THREADED}, grace_s=1.0, within_s=_SERVED_S)


class StubServer(Listener):
    """The stub server of `canned`."""

    role = "regular"

    def __init__(self, folder: Path, tokens: int) -> None:
        super().__init__("canned", free_ports(1)[0], folder)
        self._tokens = tokens

    async def start(self) -> None:
        """See `Listener.start`."""
        command = [sys.executable, "-I", "-S", str(Path(canned.__file__)), str(self.port), str(self._tokens)]
        await self._start_process(command, dict(os.environ), grace_s=1.0, within_s=_CANNED_S)


@asynccontextmanager
async def hold_nothing() -> AsyncIterator[float]:
    """In place of holding requests, where there are none; yields the time (seconds)."""
    yield time.perf_counter()


def lost(server: Server, error: EngineError) -> None:
    """Raise: a failed update raises by itself, but a failure to resume afterwards does not."""
    raise EngineError(f"{server.url} was lost: {error}")


@asynccontextmanager
async def up(listener: Listener) -> AsyncIterator[str]:
    """Run a server during the block; yields its address."""
    try:
        await listener.start()
        yield listener.url
    finally:
        await listener.stop()


async def at_once(send: Callable[[int], Coroutine[None, None, None]], count: int, concurrency: int) -> None:
    """Send `count` requests, `concurrency` at a time; each caller sends its next one without a pause."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await send(number)

    await asyncio.gather(*(caller() for _ in range(min(concurrency, count))))
