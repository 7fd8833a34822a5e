"""sglang-router as a process of ours: sessions stay on one server, and we decide which server lives.

    POST   /workers {"url": ".."}     202: it looks at the server, then takes it in
                    worker_type, bootstrap_port: of a server that only prefills, or only decodes
    DELETE /workers/ID                202
    GET    /workers                   {"workers": [{"id": "..", "url": "..", "is_healthy": true}]}

As observed on sglang-router 0.3.2.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.connection import ServerConnection
from agentrl.engine.sglang.launch.listener import HOST, Listener, free_ports
from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.types import JSON

FIRST_WAIT_S = 60.0
GRACE_S = 2.0
CHANGE_S = 60.0
"""How long the router may take to take in a server, or to let it go."""
_LOOK_AGAIN_S = 0.05
_CONTROL_S = 10.0
_ACCEPTED = 202
_OK = 200
_NOT_FOUND = 404
FLAGS: Mapping[str, str] = {
    # The only policy that keeps the requests of one x-smg-routing-key on one server. A session that is new,
    # or whose server has gone, goes where the fewest requests run.
    "policy": "manual",
    "assignment-mode": "min_load",
    # Requests have deadlines of their own, which the client keeps.
    "request-timeout-secs": "86400",
    "shutdown-grace-period-secs": "1",
    # Its default would look at a server only every 30 s until it takes it in.
    "worker-startup-check-interval": "1",
    "worker-startup-timeout-secs": str(int(CHANGE_S)),
    # Otherwise two lines for every request.
    "log-level": "warn",
}
SWITCHES: Sequence[str] = (
    # Which request may be sent again, the client decides: one that has been sampled must not be.
    "disable-retries",
    # One judge of whether a server lives: whoever adds and removes it. A second one would send nothing to a
    # server that was added again, until a minute has passed (circuit breaker) or it has been healthy often
    # enough (health checks); and it would take sessions, with their caches, from one that is only busy.
    "disable-circuit-breaker",
    "disable-health-check",
)


class _Worker(wire.WireModel):
    id: str
    url: str
    is_healthy: bool


class _Workers(wire.WireModel):
    workers: list[_Worker]


class RouterProcess(Listener):
    """A router. Where it is started again, it knows no servers until they are added.

    settings: those of its servers; it is run by the same interpreter, with the same variables.
    disaggregated: servers that prefill and servers that decode, which share the work on each request.
    """

    def __init__(
        self, settings: ServerSettings, disaggregated: Sequence[ServerProcess] = (), *, name: str = "router"
    ) -> None:
        port, self._metrics_port = free_ports(2)
        super().__init__(name, port, settings.log_folder)
        self._python = settings.python
        self._environment = settings.environment_of(())
        self._disaggregated = {server.url: _part(server) for server in disaggregated}

    async def start(self) -> None:
        """Start it, again where it runs, and wait until it answers. Interrupted, it leaves nothing.

        Raises:
            EngineUnavailableError: it ended, or did not answer in time; with the last lines of its log.
        """
        flags = {
            "host": HOST,
            "port": str(self.port),
            "prometheus-host": HOST,
            "prometheus-port": str(self._metrics_port),
            **FLAGS,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        words += [f"--{name}" for name in SWITCHES]
        words += ["--pd-disaggregation"] if self._disaggregated else []
        command = [str(self._python.absolute()), "-m", "sglang_router.launch_router", *words]
        await self._bring_up(command, self._environment, grace_s=GRACE_S, within_s=FIRST_WAIT_S)

    async def workers(self) -> tuple[str, ...]:
        """The addresses of the servers that it sends requests to.

        Raises:
            EngineUnavailableError: it is not there. EngineError: it is no router.
        """
        async with self._connected() as connection:
            return tuple(worker.url for worker in await self._known(connection) if worker.is_healthy)

    async def add(self, url: str) -> None:
        """Have it send requests to a server that is healthy; returns when it does.

        Fine where it does so already.

        Raises:
            EngineUnavailableError: it is not there, or did not take the server in.
            EngineError: it refused.
        """
        async with self._connected() as connection:
            if any(worker.url == url for worker in await self._known(connection)):
                return
            told = {"url": url, "disable_health_check": True, **self._disaggregated.get(url, {})}
            await self._accepted(connection, "POST", "/workers", json.dumps(told).encode())
            await self._until(
                connection, url, lambda known: any(w.url == url and w.is_healthy for w in known)
            )

    async def remove(self, url: str) -> None:
        """Have it send no more requests to a server, dead or alive; returns when it does not.

        Those that are on their way are not ended. Fine where it sends none.

        Raises:
            EngineUnavailableError: it is not there, or did not let the server go. EngineError: it refused.
        """
        async with self._connected() as connection:
            for worker in await self._known(connection):
                if worker.url == url:
                    await self._accepted(connection, "DELETE", f"/workers/{worker.id}")
            await self._until(connection, url, lambda known: all(worker.url != url for worker in known))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[ServerConnection]:
        connection = ServerConnection(self.url, {})
        try:
            yield connection
        finally:
            await connection.close()

    async def _known(self, connection: ServerConnection) -> list[_Worker]:
        status, answer = await self._sent(connection, "GET", "/workers")
        if status != _OK:
            raise EngineError(f"the router at {self.url}/workers {wire.refusal(status, answer)}")
        return wire.read(_Workers, answer, f"{self.url}/workers").workers

    async def _accepted(
        self, connection: ServerConnection, method: str, path: str, body: bytes = b""
    ) -> None:
        status, answer = await self._sent(connection, method, path, body)
        if status not in (_OK, _ACCEPTED, _NOT_FOUND):
            raise EngineError(f"the router at {self.url}{path} {wire.refusal(status, answer)}")

    async def _sent(
        self, connection: ServerConnection, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        try:
            return await connection.answer(method, path, body, timeout_s=_CONTROL_S)
        except EngineUnavailableError as error:
            reason = str(error).rstrip(".")
            raise EngineUnavailableError(
                f"the router at {self.url} does not answer ({reason}); see {self.log}."
            ) from error

    async def _until(
        self, connection: ServerConnection, url: str, true: Callable[[list[_Worker]], bool]
    ) -> None:
        try:
            async with asyncio.timeout(CHANGE_S):
                while not true(await self._known(connection)):
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"the router at {self.url} was told of a change of {url} and did not make it in "
                f"{CHANGE_S:g} s; see {self.log}."
            ) from None


def _part(server: ServerProcess) -> Mapping[str, JSON]:
    if server.bootstrap_port is None:
        return {"worker_type": server.role}
    return {"worker_type": server.role, "bootstrap_port": server.bootstrap_port}
