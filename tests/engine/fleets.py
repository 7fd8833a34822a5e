"""Fleets under test: of `agentrl serve`, which starts in seconds, and of real SGLangs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agentrl.engine.config import Role
from agentrl.engine.served.config import CONTROL_KEY
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet, Health
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings
from agentrl.engine.sglang.launch.listener import Listener, free_ports
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER, plugin_folder
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from tests.engine.serving import CONTROL, KEY, save_tiny, sglang_python
from tests.engine.subjects import VOCAB, text_of

EAGER = Health(interval_s=0.3, timeout_s=1.0)
PATIENT = Health(interval_s=1.0, timeout_s=60.0)


class Served(Listener):
    """`agentrl serve` as a process."""

    role = "regular"

    def __init__(self, folder: Path, number: int = 0):
        super().__init__(f"server-{number}", free_ports(1)[0], folder)
        self.model = folder / "model"

    async def start(self) -> None:
        arguments = ["serve", str(self.model), "--port", str(self.port), "--max-slots", "4"]
        command = [sys.executable, "-m", "agentrl.cli", *arguments, "--max-context-len", "1024"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", CONTROL_KEY: KEY}
        await self._start_process(command, environment, grace_s=1, within_s=60)


@asynccontextmanager
async def served_fleet(
    folder: Path, health: Health = EAGER, on_event: Callable[[str], None] = print
) -> AsyncIterator[Fleet]:
    """One `agentrl serve` over the first tiny model."""
    save_tiny(folder / "model", context_len=1024)
    process = Served(folder)
    await process.start()
    policy = SGLangPolicy(process.url, vocab_size=VOCAB, decode=text_of, resend_lost=True, attempts=10)
    transport = Disk(folder / "weights", model=folder / "model")
    fleet = Fleet([process], None, policy, transport, process.stop, health, on_event, CONTROL).watch()
    try:
        yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def sglang_fleet(
    folder: Path,
    count: int,
    health: Health = PATIENT,
    *,
    device: str = "cpu",
    context_len: int = 256,
    model: Path | None = None,
    gpus: Sequence[str] = (),
    roles: Sequence[Role] = ("regular",),
    **arguments: object,
) -> AsyncIterator[Fleet]:
    """Real SGLangs: `count` of each role, with as many of the GPUs. model: None = the first tiny one."""
    limits = {"max_running_requests": 4, "max_total_tokens": 4 * context_len, "context_length": context_len}
    settings = ServerSettings(
        model=model or save_tiny(folder / "model", context_len=context_len),
        log_folder=folder,
        device=device,
        arguments={"custom_weight_loader": [LOADER], **limits, **arguments},
        python=sglang_python(),
        python_path=(LOADER_FOLDER, plugin_folder(folder / "plugin")),
    )
    each = len(gpus) // len(roles)
    groups = [
        ServerReplicas(replace(settings, role=role), count, gpus[n * each : (n + 1) * each])
        for n, role in enumerate(roles)
    ]
    async with Servers(*groups) as servers:
        policy = SGLangPolicy(servers.url, vocab_size=VOCAB, decode=text_of, resend_lost=True, attempts=10)
        fleet = Fleet(servers.servers, servers.router, policy, SharedMemory(), _no_op, health).watch()
        try:
            yield fleet
        finally:
            await fleet.close()


async def _no_op() -> None:
    pass


def pids_at(port: int) -> list[int]:
    """All processes under the guard whose command line has this port, without the guard itself."""
    parents, matches, guards = {}, [], set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if str(port).encode() in arguments:
                matches.append(int(entry.name))
                guards |= (
                    {int(entry.name)}
                    if any(argument.endswith(b"guard.py") for argument in arguments)
                    else set()
                )
    # Some processes rename themselves.
    for pid in matches:
        matches += [child for child, parent in parents.items() if parent == pid and child not in matches]
    return [pid for pid in matches if pid not in guards]


def send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to all of them."""
    for pid in pids:
        os.kill(pid, number)


async def until(condition, within_s: float = 60.0) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
