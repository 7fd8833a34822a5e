"""sglang-router as a subprocess: sessions stay on one server, and agentrl adds and removes servers.

    POST   /workers {"url": ".."}     202: it checks the server, then adds it
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
from dataclasses import replace

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.connection import ServerConnection
from agentrl.engine.sglang.launch.arguments import Value, installed
from agentrl.engine.sglang.launch.launcher import Launcher, ServerHandle
from agentrl.engine.sglang.launch.listener import HOST, Listener, free_ports
from agentrl.engine.sglang.launch.process import ServerSettings
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.types import JSON

FIRST_WAIT_S = 60.0
GRACE_S = 2.0
CHANGE_TIMEOUT_S = 60.0
"""How long the router may take to add or remove a server."""
_POLL_S = 0.05
_CONTROL_TIMEOUT_S = 10.0
_ACCEPTED = 202
_OK = 200
_KEY_MODULE = "agentrl_router_key"
_NOT_FOUND = 404
DEFAULTS: Mapping[str, Value] = {
    # The only policy that routes the requests of one x-smg-routing-key to one server. A new session, and one
    # whose server was removed, is assigned to the server with the fewest requests.
    "policy": "manual",
    "assignment_mode": "min_load",
    # The client enforces the deadline of each request.
    "request_timeout_secs": 86_400,
    "shutdown_grace_period_secs": 1,
    # By default it checks a new server only every 30 s.
    "worker_startup_check_interval": 1,
    "worker_startup_timeout_secs": int(CHANGE_TIMEOUT_S),
    # The default writes two lines for every request.
    "log_level": "warn",
    # Only the fleet decides whether a server is up. The router's own checks would send nothing to a restarted
    # server until a minute has passed (circuit breaker) or it has been healthy often enough (health checks);
    # and they would move sessions away from a busy server, and lose their caches.
    "disable_circuit_breaker": True,
    "disable_health_check": True,
}
"""Arguments of a router where `ServerSettings.router` leaves them out."""


class _Worker(wire.WireModel):
    id: str
    url: str
    is_healthy: bool


class _Workers(wire.WireModel):
    workers: list[_Worker]


class RouterProcess(Listener):
    """A router. After a restart it has no servers until they are added.

    settings: of its servers; the router runs in the same interpreter, with the same variables. Its own are
    host and key, which all requests but those of its health must have; None = it asks for none.
    servers: those that may be added, beside others without a key and with the role `regular`. Where some
    prefill and some decode, each request uses one of both.
    """

    def __init__(
        self, settings: ServerSettings, servers: Sequence[ServerHandle] = (), *, name: str = "router"
    ) -> None:
        (port,) = free_ports(1, settings.host)
        self._metrics_port = next(other for other in free_ports(2) if other != port)
        super().__init__(name, port, settings.log_folder, settings.host)
        self._python, self.key = settings.python, settings.key
        self._environment, self._arguments = settings.environment_of(()), settings.router
        self._servers = tuple(servers)
        self._disaggregated = any(server.role != "regular" for server in servers)

    async def command(self) -> list[str]:
        """The command line that starts it, with arguments that the installed version accepts.

        Raises:
            ConfigError: it is not installed, or an argument is invalid.
        """
        available = await installed(self._python, self._environment, "sglang_router")
        ours = {
            "--host": self.host,
            "--port": str(self.port),
            "--prometheus-host": HOST,
            "--prometheus-port": str(self._metrics_port),
        }
        # The client decides which request to send again: one with sampled tokens must not be.
        switches = ["--disable-retries", *(["--pd-disaggregation"] if self._disaggregated else [])]
        chosen = available.command_line(self._arguments, DEFAULTS)
        module = "sglang_router.launch_router" if self.key is None else _KEY_MODULE
        fixed = [part for pair in ours.items() for part in pair]
        return [str(self._python.absolute()), "-m", module, *fixed, *switches, *chosen]

    async def start(self) -> None:
        """Start or restart it, and wait until it answers. On interruption it is stopped.

        Raises:
            ConfigError: see `command`.
            EngineUnavailableError: it ended, or did not answer in time; with the last lines of its log.
        """
        command = await self.command()
        await self._start_process(command, self._environment, grace_s=GRACE_S, within_s=FIRST_WAIT_S)

    async def workers(self) -> tuple[str, ...]:
        """The addresses of its healthy servers.

        Raises:
            EngineUnavailableError: it is not reachable. EngineError: it is no router.
        """
        async with self._connected() as connection:
            return tuple(worker.url for worker in await self._list_workers(connection) if worker.is_healthy)

    async def add(self, url: str) -> None:
        """Add a healthy server; returns when the router sends requests to it.

        A server that was added before is ignored.

        Raises:
            EngineUnavailableError: the router is not reachable, or did not add the server in time.
            EngineError: it refused.
        """
        async with self._connected() as connection:
            if any(worker.url == url for worker in await self._list_workers(connection)):
                return
            payload = {"url": url, "disable_health_check": True, **self._fields_of(url)}
            await self._send_change(connection, "POST", "/workers", json.dumps(payload).encode())
            await self._until(
                connection,
                url,
                lambda workers: any(worker.url == url and worker.is_healthy for worker in workers),
            )

    async def remove(self, url: str) -> None:
        """Remove a server, whether it runs or not; returns when the router sends no more requests to it.

        Running requests are not aborted. A server that is not there is ignored.

        Raises:
            EngineUnavailableError: the router is not reachable, or did not remove the server in time.
            EngineError: it refused.
        """
        async with self._connected() as connection:
            for worker in await self._list_workers(connection):
                if worker.url == url:
                    await self._send_change(connection, "DELETE", f"/workers/{worker.id}")
            await self._until(connection, url, lambda workers: all(worker.url != url for worker in workers))

    def _fields_of(self, url: str) -> Mapping[str, JSON]:
        """What the router needs to know of a server. It sends the key on, so that its clients need none."""
        server = next((server for server in self._servers if server.url == url), None)
        if server is None:
            return {}
        fields: dict[str, JSON] = {} if server.key is None else {"api_key": server.key}
        if self._disaggregated:
            fields["worker_type"] = server.role
        if server.bootstrap_port is not None:
            fields["bootstrap_port"] = server.bootstrap_port
        return fields

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[ServerConnection]:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        connection = ServerConnection(self.url, headers)
        try:
            yield connection
        finally:
            await connection.close()

    async def _list_workers(self, connection: ServerConnection) -> list[_Worker]:
        status, body = await self._send(connection, "GET", "/workers")
        if status != _OK:
            raise EngineError(f"the router at {self.url}/workers {wire.refusal(status, body)}")
        return wire.read(_Workers, body, f"{self.url}/workers").workers

    async def _send_change(
        self, connection: ServerConnection, method: str, path: str, body: bytes = b""
    ) -> None:
        status, answer = await self._send(connection, method, path, body)
        if status not in (_OK, _ACCEPTED, _NOT_FOUND):
            raise EngineError(f"the router at {self.url}{path} {wire.refusal(status, answer)}")

    async def _send(
        self, connection: ServerConnection, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        try:
            return await connection.answer(method, path, body, timeout_s=_CONTROL_TIMEOUT_S)
        except EngineUnavailableError as error:
            reason = str(error).rstrip(".")
            raise EngineUnavailableError(
                f"the router at {self.url} does not answer ({reason}); see {self.log}."
            ) from error

    async def _until(
        self, connection: ServerConnection, url: str, condition: Callable[[list[_Worker]], bool]
    ) -> None:
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                while not condition(await self._list_workers(connection)):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"the router at {self.url} accepted a change of {url} and did not make it in "
                f"{CHANGE_TIMEOUT_S:g} s; see {self.log}."
            ) from None


def router_of(
    settings: ServerSettings, launcher: Launcher, servers: Sequence[ServerHandle] = ()
) -> RouterProcess:
    """The router before servers, where their launcher has it listen; other arguments as `RouterProcess`."""
    host = launcher.router_host
    key = launcher.key if host != HOST else None
    return RouterProcess(replace(settings, host=host, key=key), servers)
