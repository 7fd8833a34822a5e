"""Two machines of one Ray cluster, as network namespaces, and ranks on both: run in namespaces of its own.

    unshare -Urnm python -m tests.processes.on_two_machines SCENARIO FOLDER

It prints one line of JSON. The driver and Ray's head are on the first machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from agentrl.types.seams import Sampling
from tests.processes.machines import FAR, NEAR, kill_far, two_machines, wait_for


def plan_of(folder: Path, loss=None):
    from agentrl.losses import PolicyLoss, ValueLoss
    from agentrl.trainer.megatron.config import MegatronConfig
    from agentrl.trainer.megatron.plan import MegatronPlan
    from agentrl.trainer.plan import Learning
    from agentrl.weights.hf.export import save_model
    from tests.trainer.tiny import qwen3, settings, tokenizer

    model = folder / "model"
    if not model.exists():
        save_model(qwen3(torch.float32), tokenizer(), str(model))
    return MegatronPlan(
        layout=MegatronConfig(actor_num_nodes=2, tensor_model_parallel_size=2),
        policy=Learning(loss or PolicyLoss(), settings(lr=1e-2), 6),
        models={"old": str(model), "ref": str(model)},
        critic=Learning(ValueLoss(), settings(lr=3e-2), 6),
        critic_warmup=1,
    )


@contextmanager
def ranks_on_both(folder: Path, address: str):
    from agentrl.processes.config import ClusterConfig
    from agentrl.processes.placement import RankNeeds, layout_of
    from agentrl.processes.ray.placement import placed
    from agentrl.processes.ray.session import connected
    from agentrl.trainer.megatron.plan import WORKER
    from tests.processes.ranks import ranks_on

    config = ClusterConfig(cluster="ray", ray_address=address)
    with connected(config, folder, os.environ) as session:
        # A machine has one CPU. The second one is still coming up: the run waits for it.
        placement = placed(session, layout_of(RankNeeds(2, 1, 1.0, 0), (), colocate=False), 300.0)
        assert [allocation.host for allocation in placement.ranks] == [NEAR, FAR]
        ranks = ranks_on(session, placement, 2, folder / "on-ray", preloaded=WORKER)
        try:
            yield ranks
        finally:
            ranks.close()


async def same(folder: Path, address: str) -> dict[str, object]:
    """Ranks on two machines learn what two child processes of one machine learn."""
    from agentrl.trainer.launch.processes import Processes
    from agentrl.trainer.megatron.plan import WORKER
    from agentrl.trainer.ranks import RankTrainer
    from tests.trainer.test_processes import learned

    local = Processes(2, folder / "local", preloaded=WORKER)
    expected = await learned(await RankTrainer.started(local, plan_of(folder)))
    local.close()
    with ranks_on_both(folder, address) as ranks:
        trainer = await RankTrainer.started(ranks, plan_of(folder))
        found = await learned(trainer)
        ranks.print_stacks()
        logs = [rank.log for rank in ranks._ranks]
        wait_for(
            lambda: all(
                "actor_method_executor" in log.read_text() or "main_loop" in log.read_text() for log in logs
            )
        )
    return {"same": found == expected, "logs": sorted(log.name for log in logs)}


async def lost(folder: Path, address: str) -> dict[str, object]:
    """The second machine is lost in the middle of an update."""
    from agentrl.errors import TrainerError
    from agentrl.trainer.ranks import RankTrainer
    from tests.processes.test_ray_ranks import WaitsFor
    from tests.trainer.test_roles import with_returns
    from tests.trainer.tiny import batch

    with ranks_on_both(folder, address) as ranks:
        plan = plan_of(folder, WaitsFor(folder / "begun", folder / "never"))
        trainer = await RankTrainer.started(ranks, plan)
        near = ranks.pids[0]
        updating = asyncio.create_task(trainer.update(with_returns(batch())))
        # The critic's first step goes before it.
        await asyncio.wait_for(updating, 600)
        updating = asyncio.create_task(trainer.update(with_returns(batch())))
        while not (folder / "begun").exists():
            await asyncio.sleep(0.05)
        kill_far()
        try:
            await updating
        except TrainerError as error:
            message = str(error)
        wait_for(lambda: not Path(f"/proc/{near}").exists())
    return {"message": message}


async def players_lost(folder: Path, address: str) -> dict[str, object]:
    """The second machine is lost while its player has groups in play; the other player takes them over."""
    from agentrl.processes.config import ClusterConfig
    from agentrl.processes.placement import PlayerNeeds, layout_of
    from agentrl.processes.ray.placement import placed
    from agentrl.processes.ray.session import connected
    from agentrl.rollout.players.ray_players import RayPlayers
    from tests.rollout.player_scenarios import Engine, players_in, prompt

    engine = Engine()
    engine.is_held.clear()
    with connected(ClusterConfig(cluster="ray", ray_address=address), folder, os.environ) as session:
        layout = layout_of(None, (), [PlayerNeeds(1.0, 0)] * 2, colocate=False)
        placement = placed(session, layout, 300.0)
        assert [allocation.host for allocation in placement.players] == [NEAR, FAR]
        launcher = RayPlayers(session, placement.group, placement.players)
        players, lines = players_in(folder, engine, launcher)
        async with players:
            playing = [asyncio.create_task(players.play(prompt(index), version=0)) for index in range(4)]
            while len(engine.sessions) < 8:
                await asyncio.sleep(0.05)
            before = len(engine.sessions)
            kill_far()
            while len(engine.sessions) < before + 4:
                await asyncio.sleep(0.05)
            engine.is_held.set()
            outcomes = [outcome.group.id for outcome in await asyncio.gather(*playing)]
        cancelled = len(engine.cancelled)
    return {"groups": outcomes, "lines": lines, "cancelled": cancelled}


async def weights(folder: Path, address: str) -> dict[str, object]:
    """A real server of the second machine gets its weights from a rank of the first one."""
    from agentrl.engine.sglang.launch.ray_servers import RayLauncher
    from agentrl.processes.config import ClusterConfig
    from agentrl.processes.placement import RankNeeds, ServerNeeds, layout_of
    from agentrl.processes.ray.placement import placed
    from agentrl.processes.ray.session import connected
    from agentrl.trainer.launch.rank_snapshot import RankSnapshot
    from agentrl.trainer.ranks import RankTrainer
    from agentrl.trainer.torch.plan import WORKER
    from tests.engine.serving import save_tiny
    from tests.engine.test_fleet import expect_versions
    from tests.processes.ranks import ranks_on
    from tests.processes.test_servers_on_ray import fleet_in, real
    from tests.trainer.test_processes import plan_over

    async def refused(self: RankSnapshot) -> None:
        raise AssertionError("the weights do not pass through the driver")

    RankSnapshot.buckets = refused
    with connected(ClusterConfig(cluster="ray", ray_address=address), folder, os.environ) as session:
        # Only the second machine has room for the server.
        needs = RankNeeds(1, 1, 1.0, 0), [ServerNeeds(2.0, 0)]
        placement = placed(session, layout_of(*needs, colocate=False), 300.0)
        (rank,), (server,) = placement.ranks, placement.servers
        ranks = ranks_on(session, placement, 1, folder / "ranks", preloaded=WORKER)
        launcher = RayLauncher(session, placement.group, placement.servers, placement.ranks)
        prompt, versions = [1, 10, 20], []
        try:
            # Version 1 has other weights than the server starts with.
            model = save_tiny(folder / "trained", seed=1)
            trainer = await RankTrainer.started(ranks, plan_over(str(model)))
            async with fleet_in(launcher, real(folder)) as fleet:
                await trainer.publish(fleet.sink, version=1)
                done = await fleet.generate(prompt, Sampling(8, temperature=0), session="a")
                expect_versions(prompt, done)
                versions += set(done.versions.tolist())
                (url,) = [process.url for process in fleet.processes]
        finally:
            ranks.close()
    return {"versions": versions, "rank": rank.host, "server": server.host, "url": url}


async def wide(folder: Path, address: str) -> dict[str, object]:
    """A real server whose two tensor ranks are on both machines gets its weights from a rank of the first."""
    from agentrl.engine.sglang.launch.ray_servers import RayLauncher
    from agentrl.processes.config import ClusterConfig
    from agentrl.processes.placement import RankNeeds, ServerNeeds, layout_of
    from agentrl.processes.ray.placement import placed
    from agentrl.processes.ray.session import connected
    from agentrl.trainer.ranks import RankTrainer
    from agentrl.trainer.torch.plan import WORKER
    from tests.engine.serving import save_tiny
    from tests.engine.test_fleet import expect_versions
    from tests.processes.ranks import ranks_on
    from tests.processes.test_servers_on_ray import fleet_in, real
    from tests.trainer.test_processes import plan_over

    # SGLang asks which core each of its ranks on CPUs has.
    spread = {"machines": 2, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    with connected(ClusterConfig(cluster="ray", ray_address=address), folder, os.environ) as session:
        needs = RankNeeds(1, 1, 0.5, 0), [ServerNeeds(0.5, 0, machine) for machine in range(2)]
        placement = placed(session, layout_of(*needs, colocate=False), 300.0)
        ranks = ranks_on(session, placement, 1, folder / "ranks", preloaded=WORKER)
        launcher = RayLauncher(session, placement.group, placement.servers, placement.ranks)
        prompt, versions = [1, 10, 20], []
        try:
            model = save_tiny(folder / "trained", seed=1)
            trainer = await RankTrainer.started(ranks, plan_over(str(model)))
            settings = real(folder)
            settings = replace(settings, arguments={**settings.arguments, "tp_size": 2}, **spread)
            async with fleet_in(launcher, settings) as fleet:
                (server,) = fleet.processes
                await trainer.publish(fleet.sink, version=1)
                done = await fleet.generate(prompt, Sampling(8, temperature=0), session="a")
                expect_versions(prompt, done)
                versions += set(done.versions.tolist())
                parts = [part.allocation.host for part in server.parts]
        finally:
            ranks.close()
    return {"versions": versions, "parts": parts}


async def requests(folder: Path, address: str) -> dict[str, object]:
    """A player of the second machine reaches real servers of the first one by itself: the policy's and a
    judge's, at which its world asks in each episode."""
    from agentrl.records import reconcile
    from agentrl.records.status import read_status
    from agentrl.rollout.players.requests import Requests
    from tests.engine.serving import sglang_python
    from tests.flow.runs import metrics_of, train

    model = plan_of(folder).models["ref"]
    through_the_driver: list[object] = []
    Requests.handle = lambda self, message: through_the_driver.append(message)
    settings = {
        "num_rollout": 3,
        "warm_start_steps": 2,
        "warm_start_batch_size": 8,
        "eval_episodes": 8,
        "inline": False,
        "max_staleness": 1,
        "correction": "tis",
        "engine": "sglang",
        "sglang_python": str(sglang_python()),
        "cluster": "ray",
        "ray_address": address,
        "num_cpus_per_rank": 0.25,
        "num_cpus_per_server": 0.25,
        "num_rollout_workers": 1,
        # Only the second machine has room for it.
        "num_cpus_per_rollout_worker": 2,
        "sglang_models": {"judge": {"hf_checkpoint": model}},
        "env_kwargs": {"url": "sglang_models.judge"},
    }
    result = await asyncio.to_thread(train, "AsksAModel", folder, "run", **settings)
    rows = [row for row in metrics_of(result.folder) if "rollout/raw_reward" in row]
    processes = read_status(result.folder).processes
    return {
        "iterations": len(rows),
        "restarts": max(row["engine/restarts"] for row in rows),
        "problems": reconcile(result.folder).problems,
        "through the driver": len(through_the_driver),
        "player": processes["player 0"].where.rpartition(" ")[2],
        "server": processes["server-0"].where.split(":")[1].lstrip("/"),
    }


SCENARIOS = {
    "same": same,
    "lost": lost,
    "players_lost": players_lost,
    "weights": weights,
    "wide": wide,
    "requests": requests,
}

if __name__ == "__main__":
    with two_machines(far_cpus=2 if sys.argv[1] in ("weights", "requests") else 1, waits=False) as where:
        scenario = SCENARIOS[sys.argv[1]]
        print(json.dumps(asyncio.run(scenario(Path(sys.argv[2]), where))), flush=True)
