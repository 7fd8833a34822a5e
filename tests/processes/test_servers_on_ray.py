"""Real SGLang servers in the actors of a run on Ray: keys, weights, servers that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import httpx2
import numpy as np
import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.launch import LocalLauncher, ServerReplicas, Servers, ServerSettings, Value
from agentrl.engine.sglang.launch.launcher import ServerReplica
from agentrl.engine.sglang.launch.process import ServerProcess
from agentrl.engine.sglang.launch.ray_servers import RayLauncher, RayServer
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.losses import PolicyLoss
from agentrl.processes.placement import RankNeeds, ServerNeeds, layout_of
from agentrl.processes.ray.placement import placed
from agentrl.trainer.launch.rank_plan import RankPlan
from agentrl.trainer.megatron import plan as megatron_plan
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch import plan as torch_plan
from agentrl.types import ScoreRole
from agentrl.types.seams import Sampling
from tests.engine.fleets import PATIENT, pids_at, send_signal
from tests.engine.serving import save_tiny, sglang_python
from tests.engine.subjects import VOCAB, text_of
from tests.engine.test_fleet import expect_exact, expect_versions, publish, start_request, until
from tests.processes.ranks import ranks_on
from tests.trainer.test_processes import plan_over
from tests.trainer.tiny import settings as trainer_settings

pytestmark = pytest.mark.full

KEY = "the key of this test, forty characters.."
CONTEXT = 2048
PROMPT = [1, 10, 20]


def real(folder: Path) -> ServerSettings:
    limits = {"max_running_requests": 4, "max_total_tokens": 4 * CONTEXT, "context_length": CONTEXT}
    return ServerSettings(
        model=save_tiny(folder / "model", context_len=CONTEXT),
        log_folder=folder,
        device="cpu",
        arguments={"custom_weight_loader": [LOADER], **limits},
        python=sglang_python(),
        python_path=(LOADER_FOLDER,),
    )


class Elsewhere(LocalLauncher):
    """Servers at another address than this machine's own, as on another machine."""

    host = "127.0.0.1"
    is_local = False
    key = KEY

    def servers(self, replicas: Sequence[ServerReplica]) -> tuple[ServerProcess, ...]:
        return super().servers(
            [each._replace(settings=replace(each.settings, host="127.0.0.2", key=KEY)) for each in replicas]
        )


async def test_a_server_elsewhere_asks_for_the_key_which_nothing_shows(tmp_path):
    """It gets weights by a process group; the router sends the key for clients on this machine."""
    launcher = Elsewhere()
    headers = {"Authorization": f"Bearer {KEY}"}
    async with Servers(ServerReplicas(real(tmp_path)), launcher=launcher) as launched:
        (server,), router = launched.servers, launched.router
        assert router is not None
        shown = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids_at(server.port)]
        shown += [log.read_bytes() for log in (server.log, router.log)]
        assert len(shown) > 2
        assert not [text for text in shown if KEY.encode() in text]
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        async with httpx2.AsyncClient(trust_env=False, timeout=120) as client:
            statuses = {
                "stranger": (await client.post(f"{server.url}/generate", json=body)).status_code,
                "reader": (await client.get(f"{server.url}/server_info")).status_code,
                "by the router": (await client.post(f"{router.url}/generate", json=body)).status_code,
            }
        assert statuses == {"stranger": 401, "reader": 401, "by the router": 200}
        with pytest.raises(EngineError, match="401"):
            await Server(server.url).pause()
        policy = SGLangPolicy(launched.url, headers=headers, vocab_size=VOCAB, decode=text_of)
        transport = Distributed(host=launcher.host, check_loaded=False)
        fleet = Fleet([server], router, policy, transport, no_op, PATIENT, headers=headers).watch()
        try:
            await publish(fleet, 1)
            assert set((await fleet.generate(PROMPT, Sampling(4), session="a")).versions.tolist()) == {1}
        finally:
            await fleet.close()


class Exposed(LocalLauncher):
    """Servers and a router for clients on other machines, too."""

    host = "127.0.0.1"
    router_host = "127.0.0.2"
    key = KEY

    def servers(self, replicas: Sequence[ServerReplica]) -> tuple[ServerProcess, ...]:
        return super().servers(
            [each._replace(settings=replace(each.settings, host="127.0.0.2", key=KEY)) for each in replicas]
        )


async def test_a_router_for_clients_elsewhere_asks_for_the_key_which_nothing_shows(tmp_path):
    headers = {"Authorization": f"Bearer {KEY}"}
    async with Servers(ServerReplicas(real(tmp_path)), launcher=Exposed()) as launched:
        (server,), router = launched.servers, launched.router
        assert router is not None
        assert router.host == launched.servers[0].host == "127.0.0.2"
        shown = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids_at(router.port)]
        shown += [log.read_bytes() for log in (server.log, router.log)]
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        calls = {"POST": "/generate", "GET": "/workers", "DELETE": "/workers/x"}
        async with httpx2.AsyncClient(trust_env=False, timeout=120) as client:
            statuses = {
                path: (await client.request(method, f"{router.url}{path}", json=body)).status_code
                for method, path in calls.items()
            }
            # These it answers to anybody.
            known = (
                "/v1/models",
                "/get_model_info",
                "/get_server_info",
                "/engine_metrics",
                "/health_generate",
            )
            shown += [(await client.get(f"{router.url}{path}")).content for path in known]
        assert statuses == dict.fromkeys(calls.values(), 401)
        policy = SGLangPolicy(launched.url, headers=headers, vocab_size=VOCAB, decode=text_of)
        assert len((await policy.generate(PROMPT, Sampling(4), session="a")).token_ids) == 4
        await policy.close()
        assert not [text for text in shown if KEY.encode() in text]
        await router.stop()
        await router.start()
        await router.add(server.url)
        assert await router.workers() == (server.url,)


async def no_op() -> None:
    pass


@asynccontextmanager
async def fleet_in(
    launcher: RayLauncher, settings: ServerSettings, transport: Distributed | None = None
) -> AsyncIterator[Fleet]:
    """One server, on any machine, that gets its weights by a process group."""
    headers = {"Authorization": f"Bearer {launcher.key}"}
    async with Servers(ServerReplicas(settings), launcher=launcher) as servers:
        policy = SGLangPolicy(servers.url, headers=headers, vocab_size=VOCAB, decode=text_of)
        transport = transport or Distributed(host=launcher.host, check_loaded=False)
        fleet = Fleet(
            servers.servers, servers.router, policy, transport, no_op, PATIENT, headers=headers
        ).watch()
        try:
            yield fleet
        finally:
            await fleet.close()


async def serves_the_weights_of_a_rank(
    session,
    folder: Path,
    plan: Callable[[Path], tuple[RankPlan, str]],
    backend: Literal["gloo", "nccl"] = "gloo",
    num_gpus: int = 0,
    tolerance: float = 2e-5,
    **arguments: Value,
) -> None:
    """A rank, with GPUs of its own, sends new weights to a real server in a process group.

    plan: of the trainer over a model in that folder, with the module of its worker. tolerance: of logprobs.
    """
    needs = RankNeeds(1, 1, 0.5, num_gpus), [ServerNeeds(0.5, num_gpus)]
    placement = placed(session, layout_of(*needs, colocate=False), 60)
    # Version 1 has other weights than the server starts with.
    rank_plan, worker = plan(save_tiny(folder / "trained", context_len=CONTEXT, seed=1))
    ranks = ranks_on(session, placement, 1, folder / "ranks", preloaded=worker)
    launcher = RayLauncher(session, placement.group, placement.servers, placement.ranks)
    settings = real(folder)
    settings = replace(
        settings,
        device="cuda" if num_gpus else "cpu",
        arguments={**settings.arguments, **arguments},
    )
    try:
        trainer = await RankTrainer.started(ranks, rank_plan)
        async with fleet_in(launcher, settings, Distributed(host=launcher.host, backend=backend)) as fleet:
            for version in (1, 2):
                await trainer.publish(fleet.sink, version=version)
                done = await fleet.generate(PROMPT, Sampling(8, temperature=0), session="a")
                assert set(done.versions.tolist()) == {version}
                # The trainer has not learned: both versions are the second tiny model.
                expect_versions(PROMPT, replace(done, versions=np.ones_like(done.versions)), tolerance)
    finally:
        ranks.close()
        placement.remove()


def over_torch(model: Path) -> tuple[RankPlan, str]:
    """The torch trainer."""
    return plan_over(str(model)), torch_plan.WORKER


def over_megatron(model: Path) -> tuple[RankPlan, str]:
    """One rank of Megatron."""
    learning = Learning(PolicyLoss(), trainer_settings(lr=1e-2), 6)
    models: dict[ScoreRole, str] = {"old": str(model)}
    return megatron_plan.MegatronPlan(
        layout=MegatronConfig(), policy=learning, models=models
    ), megatron_plan.WORKER


@pytest.mark.parametrize("plan", [over_torch, over_megatron])
async def test_a_server_has_the_weights_that_a_rank_has_sent_it(session, tmp_path, plan):
    await serves_the_weights_of_a_rank(session, tmp_path, plan)


@asynccontextmanager
async def fleet_on_ray(session, folder: Path, events: list[str]) -> AsyncIterator[Fleet]:
    placement = placed(session, layout_of(None, [ServerNeeds(0.1, 0)] * 2, colocate=False), 60)
    launcher = RayLauncher(session, placement.group, placement.servers)
    try:
        async with Servers(ServerReplicas(real(folder), count=2), launcher=launcher) as servers:
            policy = SGLangPolicy(
                servers.url, vocab_size=VOCAB, decode=text_of, resend_lost=True, attempts=10
            )
            transport = SharedMemory()
            fleet = Fleet(
                servers.servers, servers.router, policy, transport, no_op, PATIENT, on_event=events.append
            )
            try:
                yield fleet.watch()
            finally:
                await fleet.close()
    finally:
        placement.remove()


@pytest.mark.faults
async def test_a_server_an_actor_and_the_router_that_are_killed_are_replaced(session, tmp_path):
    """Each is killed while requests run. All requests end, on the version that every server was sent."""
    events: list[str] = []
    async with fleet_on_ray(session, tmp_path, events) as fleet:
        await publish(fleet, 1)
        server, other = fleet.processes
        assert isinstance(server, RayServer)
        assert isinstance(other, RayServer)
        for kill in (
            lambda: send_signal(pids_at(server.port), signal.SIGKILL),
            lambda: os.kill(other.actor_pid, signal.SIGKILL),
            lambda: send_signal(pids_at(fleet.router.port), signal.SIGKILL),
        ):
            restarts = fleet.counts["restarts"]
            running = [start_request(fleet, 10 * restarts + number) for number in range(4)]
            await until(lambda: sum(pending.sent for pending in fleet.policy._pending) == 4)
            await asyncio.sleep(0.1)
            kill()
            assert not any(task.done() for _, task in running), "it strikes in flight"
            await asyncio.wait([task for _, task in running], timeout=900)
            assert await expect_exact(running) == [{1}] * 4
            while fleet.counts["restarts"] == restarts or not all(
                m.routed for m in fleet._membership.members
            ):
                await asyncio.sleep(0.1)
        members = fleet._membership.members
        assert [await member.control.weight_version() for member in members] == [1, 1]
        urls = sorted(member.process.url for member in members)
        assert sorted(await fleet.policy.servers()) == urls
    assert any(
        "server-0: it ended (exit code 137); it is restarted. the last lines of" in e for e in events
    ), events
    assert any("server-1: its actor, process" in e and "the last lines of" in e for e in events), events
    assert any("the router: it ended" in e for e in events), events
