"""Servers at several addresses are one engine: behind a router of the run's, with the run's weights."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import httpx2
import pytest

from agentrl.assembly.fleet import FleetPlan
from agentrl.engine.config import EngineConfig
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.engine.served.config import CONTROL_KEY
from agentrl.errors import ConfigError
from agentrl.http.serving import RequestChecks
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from tests.engine.fleets import until
from tests.engine.serving import CODEC, KEY, free_port, save_tiny
from tests.engine.sglang_launch.starting import STAND_IN
from tests.engine.subjects import VOCAB, text_of, tiny
from tests.engine.test_fleet import expect_versions, publish
from tests.listening import listening

PROMPT = [1, 10, 20, 30]
GREEDY = Sampling(6, temperature=0.0)


class Hosted:
    """`agentrl serve` in this process, which can end, hang, and start again at its address.

    seed: of the weights that it starts with. sessions: requests by routing key.
    """

    def __init__(self, seed: int, loading: asyncio.Lock):
        self.seed, self.port, self.loading = seed, free_port(), loading
        self.url = f"http://127.0.0.1:{self.port}"
        self.sessions = Counter[str]()
        self.hangs = False
        self._stack = AsyncExitStack()

    async def start(self):
        self.engine = EmbeddedEngine.from_model(
            tiny("qwen3", self.seed), max_slots=8, max_context_len=256, decode=text_of
        )
        app = EngineApp(self.engine, CODEC, name="tiny", checks=RequestChecks(control_key=KEY)).app

        async def counted(scope, receive, send):
            if scope["type"] == "http" and scope["path"] == "/generate":
                self.sessions[dict(scope["headers"])[b"x-smg-routing-key"].decode()] += 1
            while self.hangs:
                await asyncio.sleep(0.01)
            # transformers loads one model at a time in a process.
            is_loading = scope.get("path") == "/update_weights_from_disk"
            async with self.loading if is_loading else nullcontext():
                await app(scope, receive, send)

        await self._stack.enter_async_context(listening(counted, self.port))

    async def stop(self):
        await self._stack.aclose()


@pytest.fixture
async def hosted(monkeypatch):
    """Two servers, with weights of their own."""
    monkeypatch.setenv(CONTROL_KEY, KEY)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    loading = asyncio.Lock()
    servers = [Hosted(seed, loading) for seed in (2, 3)]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


def plan_of(folder: Path, servers, events, **changes) -> FleetPlan:
    settings = {
        "engine": "sglang",
        "sglang_url": [server.url for server in servers],
        "update_weights_transport": "disk",
        "rollout_health_check_interval": 0.2,
        "rollout_health_check_timeout": 0.3,
        "sglang_python": sys.executable,
    }
    return FleetPlan(
        model=save_tiny(folder / "model"),
        config=EngineConfig(**settings | changes),
        folder=folder / "engine",
        on_event=events.append,
        vocab_size=VOCAB,
        decode=text_of,
    )


async def turns(fleet, sessions, number=1):
    """Play turns in sessions, which go on with what was sampled before; returns the last of each."""

    async def play(session):
        prompt = PROMPT
        for _ in range(number):
            done = await fleet.generate(prompt, GREEDY, session=session)
            assert done.finish is Finish.LENGTH
            expect_versions(prompt, done)
            prompt = [*prompt, *done.token_ids.tolist()]
        return done

    return await asyncio.gather(*map(play, sessions))


async def test_an_episode_stays_on_a_server_which_has_the_weights_of_the_run(tmp_path, hosted):
    events, sessions = [], [f"episode-{n}" for n in range(8)]
    first, second = hosted
    fleet = await plan_of(tmp_path, hosted, events).join()
    try:
        await turns(fleet, sessions, 3)
        of_server = {session: [server.sessions[session] for server in hosted] for session in sessions}
        assert all(sorted(counts) == [0, 3] for counts in of_server.values()), of_server
        assert all(1 < sum(map(bool, server.sessions.values())) < 7 for server in hosted), of_server

        await publish(fleet, 1)
        assert [server.engine.version for server in hosted] == [1, 1]
        assert {v for done in await turns(fleet, sessions) for v in done.versions.tolist()} == {1}

        # The server that has ended has its sessions played on by the other one.
        await second.stop()
        await turns(fleet, sessions)
        assert first.sessions.keys() == {*sessions}
        await until(lambda: len(events) > 1)
        assert second.url in events[1]
        # Who started it starts it again, with weights of its own: it gets the run's before any request.
        second.sessions.clear()
        await second.start()
        assert second.engine.version == 0
        await until(lambda: fleet.incidents)
        late = await turns(fleet, [f"late-{n}" for n in range(8)])
        assert {version for done in late for version in done.versions.tolist()} == {1}
        assert second.sessions.keys() & {f"late-{n}" for n in range(8)}
    finally:
        await fleet.close()
    for server in hosted:
        health = await asyncio.to_thread(httpx2.get, f"{server.url}/health", trust_env=False)
        assert health.status_code == 200, "it goes on"
    with pytest.raises(httpx2.ConnectError):
        await asyncio.to_thread(httpx2.get, fleet.url, trust_env=False)


async def test_what_hangs_in_a_server_is_sent_to_another(tmp_path, hosted, monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.request.ABORT_TIMEOUT_S", 0.3)
    events, sessions = [], [f"episode-{n}" for n in range(4)]
    fleet = await plan_of(tmp_path, hosted, events).join()
    try:
        await turns(fleet, sessions)
        hosted[1].hangs = True
        await asyncio.wait_for(turns(fleet, sessions), 30)
        assert fleet.counts["lost"] >= 1
        assert "failed its health check" in events[1]
    finally:
        hosted[1].hangs = False
        await fleet.close()


async def test_an_evaluation_leaves_the_servers_their_weights(tmp_path, hosted):
    fleet = await plan_of(tmp_path, hosted, events := []).join(trains=False)
    try:
        await asyncio.gather(*(fleet.generate(PROMPT, GREEDY, session=f"{n}") for n in range(4)))
    finally:
        await fleet.close()
    assert [server.engine.version for server in hosted] == [0, 0]
    assert all(server.sessions for server in hosted)
    assert events == [f"the router at {fleet.url} sends to {hosted[0].url}, {hosted[1].url}"]


async def test_a_router_is_one_address_and_what_it_serves_is_several(tmp_path, hosted):
    """The servers behind a router of somebody else's get weights, and requests through the run's own."""
    outer = await plan_of(tmp_path / "outer", hosted, []).join(trains=False)
    addresses = [outer, hosted[0]]
    fleet = await plan_of(tmp_path / "inner", addresses, events := []).join()
    try:
        await turns(fleet, ["a", "b", "c"])
    finally:
        await fleet.close()
        await outer.close()
    assert events[0].endswith(f"sends to {hosted[0].url}, {hosted[1].url}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"router": {"cache_treshold": 0.5}}, "no argument `cache_treshold`. Did you mean `cache_threshold`"),
        ({"router": {"worker_urls": "x"}}, "is set by agentrl: the run adds its servers"),
        ({"router": {"disable_retries": False}}, "the run sends a request again"),
        ({"router": {"policy": "nearest"}}, "sglang-router's argument `policy` cannot be 'nearest'"),
        ({"router": {"policy": {}}}, "sglang-router's argument `policy` is a number, a text"),
        ({"sglang_python": "/nowhere"}, "/nowhere cannot be run"),
    ],
)
async def test_a_router_that_cannot_start_is_one_sentence(tmp_path, hosted, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        await plan_of(tmp_path, hosted, [], **changes).join()


async def test_a_server_that_is_not_there_is_one_sentence(tmp_path, hosted):
    await hosted[1].stop()
    with pytest.raises(ConfigError, match=rf"{hosted[1].url}.* cannot be reached .*is the server up\?"):
        await plan_of(tmp_path, hosted, []).join()


async def test_without_a_router_here_it_says_what_to_install(tmp_path, hosted, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ConfigError, match="install sglang-router there"):
        await plan_of(tmp_path, hosted, []).join()
