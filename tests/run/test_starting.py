"""Servers and ranks start at the same time, and neither outlives the other: both are really killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from agentrl.assembly import cluster
from agentrl.assembly.cards import shared_gpus
from agentrl.assembly.config import RunConfig
from agentrl.assembly.trainer import TrainerFactory
from agentrl.engine.sglang.launch import ServerReplicas, Servers
from agentrl.errors import EngineUnavailableError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.run.starting import builds_at_once, unless_a_rank_ends
from agentrl.runtime.activity import Activities
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.source import open_source
from tests.engine.sglang_launch.starting import logged_pids, settings
from tests.tools.mcp.watching import alive, until
from tests.trainer.tiny import qwen3, tokenizer

SGLANG = {"engine": {"engine": "sglang"}, "warm_start": {"warm_start_steps": 0}}


def config_of(**sections):
    return RunConfig.model_validate({"env": {"env": "tests.flow.worlds:Bandit"}, **SGLANG, **sections})


@asynccontextmanager
async def trainers_in(folder):
    """A factory over a tiny model, and that model."""
    import torch

    save_model(qwen3(torch.float32), tokenizer(), folder / "model")
    trainers = TrainerFactory(config_of(), folder / "trainer")
    try:
        yield trainers, open_source(folder / "model")
    finally:
        await trainers.close()


async def starts(folder, *habit):
    """Servers that start; they end with this coroutine."""
    async with Servers(ServerReplicas(settings(folder, *habit))):
        return "up"


def pids_of(trainers):
    return [int(where.split()[-1]) for where in trainers.where.values()]


async def test_networks_are_built_while_the_servers_start(tmp_path):
    async with trainers_in(tmp_path) as (trainers, source):
        with Activities().observed() as activities:
            trainers.prepare(source)
            assert activities.processes["rank 0"].name == "importing"
            trainers.begin(source, PolicyLoss())
            ranks = trainers.starting
            entered = set()

            async def watch():
                while True:
                    entered.add(activities.processes["rank 0"].name)
                    await asyncio.sleep(0.001)

            watching = asyncio.create_task(watch())
            assert await unless_a_rank_ends(trainers, starts(tmp_path, "slow")) == "up"
            trainer = await trainers.reinforcement(source, PolicyLoss())
            watching.cancel()
            assert trainer is ranks.result()
            assert {"importing", "loading weights"} <= entered
            names = [span.name for span in activities.spans if span.process == "rank 0"]
            assert names[:2] == ["importing", "build"]


@pytest.mark.parametrize("builds", [False, True])
async def test_a_rank_that_is_killed_ends_the_servers_that_start(tmp_path, builds):
    async with trainers_in(tmp_path) as (trainers, source):
        trainers.prepare(source)
        trainers.begin(source, PolicyLoss()) if builds else trainers.begin_to_import()
        (rank,) = pids_of(trainers)
        # However fast it is, it has not got further when the servers are on their way.
        os.kill(rank, signal.SIGSTOP)
        starting = asyncio.create_task(unless_a_rank_ends(trainers, starts(tmp_path, "hangs")))
        await until(lambda: len(logged_pids(tmp_path / "server-0.log")) == 3)
        servers = logged_pids(tmp_path / "server-0.log")
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"rank 0 of the trainer .* was ended by SIGKILL"):
            await asyncio.wait_for(starting, 20)
        assert not any(map(alive, servers))


@pytest.mark.parametrize("builds", [False, True])
async def test_a_server_that_ends_ends_the_ranks_that_start(tmp_path, builds):
    async with trainers_in(tmp_path) as (trainers, source):
        trainers.prepare(source)
        trainers.begin(source, PolicyLoss()) if builds else trainers.begin_to_import()
        (rank,) = pids_of(trainers)
        with pytest.raises(EngineUnavailableError, match="server-0 ended with exit code 3 before it was up"):
            await unless_a_rank_ends(trainers, starts(tmp_path, "ends"))
        began = asyncio.get_running_loop().time()
        await trainers.close()
        assert asyncio.get_running_loop().time() - began < 5.0
        assert not alive(rank)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        ({"engine": {"engine": "embedded"}}, False),
        ({"engine": {"engine": "sglang", "sglang_url": "http://127.0.0.1:1"}}, False),
        ({"trainer": {"colocate": True}}, False),
        ({"warm_start": {"warm_start_steps": 10}}, False),
    ],
)
def test_they_wait_where_weights_memory_or_turns_come_first(sections, expected):
    assert builds_at_once(config_of(**sections), is_resumed=False) is expected


def test_a_resumed_run_has_no_warm_start_to_wait_for():
    assert builds_at_once(config_of(warm_start={"warm_start_steps": 10}), is_resumed=True)


@pytest.mark.parametrize(
    ("ranks", "servers", "gpus", "shared"),
    [(1, 1, 1, ["0"]), (1, 1, 2, []), (2, 1, 2, ["1"]), (4, 4, 4, ["0", "1", "2", "3"])],
)
def test_ranks_wait_for_the_servers_of_their_own_gpu(monkeypatch, ranks, servers, gpus, shared):
    monkeypatch.setattr(cluster, "num_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    config = config_of(
        engine={"engine": "sglang", "rollout_num_gpus_per_engine": servers},
        trainer={"trainer": "megatron"},
        layout={"actor_num_gpus_per_node": ranks},
    )
    assert [*shared_gpus(config)] == shared
    assert builds_at_once(config, is_resumed=False) is not bool(shared)
