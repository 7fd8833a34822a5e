"""A server in the process of an actor, on its machine. See `ray_servers` for the driver's side.

The actor's process holds a guarded program, as a run on one machine does: the kernel ends that with it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.errors import ConfigError, EngineError

_POLL_S = 0.05


class ServerPorts(NamedTuple):
    """A server's ports on its machine. meeting_port: of its parts. problem: what is wrong with its arguments;
    "" = nothing."""

    port: int
    bootstrap_port: int | None
    meeting_port: int | None
    problem: str


class HostedServer:
    """One server, started once. log: the file of this actor's output, which has the server's, too.

    port: None = a free one. Errors are returned as sentences: the driver raises them again.
    """

    def __init__(self, settings: ServerSettings, name: str, port: int | None, log: str) -> None:
        # Ray's processes have the path of the driver's interpreter, which need not be SGLang's.
        os.environ.pop("PYTHONPATH", None)
        # A guarded program ends with the thread that started it: this one lasts as long as the actor.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agentrl-server", daemon=True).start()
        self._server = ServerProcess(settings, name=name, port=port)
        self._server.log = Path(log)
        self._starting: Future[None] | None = None

    def check(self) -> ServerPorts:
        """Check the arguments with the SGLang of this machine."""
        problem = ""
        try:
            self._submit(self._server.check()).result()
        except ConfigError as error:
            problem = str(error)
        server = self._server
        return ServerPorts(server.port, server.bootstrap_port, server.meeting_port, problem)

    def start(self) -> str:
        """Start it and wait until it is healthy; "", or why it is not."""
        self._starting = self._submit(self._server.start())
        try:
            self._starting.result()
        except CancelledError:
            return f"{self._server.name} was stopped while it started."
        except EngineError as error:
            return str(error)
        return ""

    def wait_ended(self) -> int | None:
        """Wait until no process of it runs; its exit code."""
        while self._server.running:
            time.sleep(_POLL_S)
        return self._server.returncode

    def terminate(self) -> None:
        """Begin to end it, also while it starts; any thread may call this."""
        if self._starting is not None:
            self._starting.cancel()
        self._loop.call_soon_threadsafe(self._server.terminate)

    def _submit(self, work: Coroutine[None, None, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
