"""Updates that fail half-way, and servers that die in one, while requests are in flight."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

import pytest
from starlette.responses import Response

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.transports.base import Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.errors import EngineError
from agentrl.http.serving import RequestChecks
from tests.engine.fleets import EAGER, pids_at, send_signal, sglang_fleet, until
from tests.engine.serving import CODEC, CONTROL, KEY, save_tiny
from tests.engine.subjects import VOCAB, text_of, tiny
from tests.engine.test_fleet import LONG, expect_exact, no_op, publish, start_request
from tests.listening import listening

NEW = 200


@dataclass(eq=False)
class Breaking:
    """A transport with a fault in its first delivery of `version`, before or after it is sent."""

    inner: Transport
    before: Callable[[], Awaitable[None]] = no_op
    after: Callable[[], Awaitable[None]] = no_op
    version: int = 2

    def __post_init__(self) -> None:
        self.open, self.staged, self.close = self.inner.open, self.inner.staged, self.inner.close
        self.takes_device_memory = self.inner.takes_device_memory

    async def send(self, servers, delivery):
        if delivery.version != self.version:
            return await self.inner.send(servers, delivery)
        self.version = -1
        await self.before()
        loaded = await self.inner.send(servers, delivery)
        await self.after()
        return loaded


class Member:
    """A server of a fleet that can be killed: it has no weights but the first afterwards.

    While it is down it responds with 500, as an SGLang whose scheduler has crashed.
    """

    name, role, url, left_s = "server-0", "regular", "", None

    def __init__(self) -> None:
        self._renew()

    end_reason = f"it ended (exit code {-SIGKILL})"

    def log_tail(self) -> str:
        return ""

    async def start(self) -> None:
        self._renew()

    async def stop(self) -> None:
        await self.engine.close()

    async def kill(self) -> None:
        self.running = False

    async def __call__(self, scope, receive, send) -> None:
        dead = scope["type"] == "http" and not self.running
        await (Response("dead", 500) if dead else self._app)(scope, receive, send)

    def _renew(self) -> None:
        self.engine = EmbeddedEngine.from_model(tiny("qwen3"), max_slots=4, max_context_len=256)
        self._app = EngineApp(self.engine, CODEC, name="tiny", checks=RequestChecks(control_key=KEY)).app
        self.running = True


@asynccontextmanager
async def fleet_of(folder: Path, member: Member, *, adaptive: bool = False, **faults) -> AsyncIterator[Fleet]:
    """A fleet of one server, with a fault in the first update to version 2."""
    async with listening(member) as member.url:
        policy = SGLangPolicy(
            member.url, adaptive=adaptive, vocab_size=VOCAB, decode=text_of, resend_lost=True
        )
        transport = Breaking(Disk(folder / "weights", model=save_tiny(folder / "model")), **faults)
        fleet = Fleet([member], None, policy, transport, no_op, EAGER, headers=CONTROL).watch()
        try:
            await publish(fleet, 1)
            yield fleet
        finally:
            await fleet.close()


async def in_flight(fleet, new):
    """Requests of which some have tokens, while others wait for a slot."""
    running = [start_request(fleet, number, new) for number in range(6)]
    await until(lambda: sum(pending.sent for pending in fleet.policy._pending) == len(running))
    return running


async def test_an_update_that_fails_half_way_is_undone_under_the_requests_in_flight(tmp_path):
    async def fail():
        raise EngineError("the link broke in the middle")

    async with fleet_of(tmp_path, Member(), after=fail) as fleet:
        running = await in_flight(fleet, NEW)
        with pytest.raises(EngineError, match="the link broke"):
            await publish(fleet, 2)
        assert await expect_exact(running, NEW) == [{1}] * len(running), "and each logprob is version 1's"
        assert fleet.policy.counts["resumed"] >= 4, "the update had reached them"
        assert (fleet.version, fleet.incidents) == (1, [])
        running = await in_flight(fleet, NEW)
        await publish(fleet, 3)
        assert set().union(*await expect_exact(running, NEW)) == {1, 3}


async def test_a_server_killed_in_an_update_gets_it_after_its_restart_and_no_request_is_lost(tmp_path):
    member = Member()
    async with fleet_of(tmp_path, member, adaptive=True, before=member.kill) as fleet:
        running = await in_flight(fleet, NEW)
        await publish(fleet, 2)
        versions = await expect_exact(running, NEW)
        assert {2} <= set().union(*versions) <= {1, 2}
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        assert fleet.version == 2


@pytest.mark.faults
async def test_a_real_server_killed_in_an_update_gets_it_after_its_restart(tmp_path):
    async with sglang_fleet(tmp_path, 1, context_len=2048) as fleet:
        port = fleet.processes[0].port

        async def kill():
            send_signal(pids_at(port), SIGKILL)

        fleet.sink._sink._transport = Breaking(fleet.transport, before=kill)
        await publish(fleet, 1)
        running = await in_flight(fleet, LONG)
        await publish(fleet, 2)
        versions = await expect_exact(running)
        assert {2} <= set().union(*versions) <= {1, 2}
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        assert fleet.version == 2
    assert pids_at(port) == []
