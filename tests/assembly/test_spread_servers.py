"""A server of more GPUs than a machine has: its place on several, on paper, and what starts it there."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from agentrl.assembly.cluster import cluster_facts, needs_of, run_layout, server_names
from agentrl.assembly.fleet import FleetPlan
from agentrl.assembly.places import local_servers
from agentrl.engine.config import EngineConfig
from agentrl.errors import ConfigError
from agentrl.processes.config import ClusterConfig
from agentrl.processes.placement import Bundle, PlacedBundle
from tests.assembly.test_every_setting import config_of
from tests.engine.serving import save_tiny, sglang_python
from tests.engine.sglang_launch.starting import STAND_IN

CPUS = ClusterConfig().num_cpus_per_server
RAY = {"cluster": "ray"}
WIDE = {
    **{"engine": "sglang", "rollout_num_engines": 2, "rollout_num_gpus_per_engine": 16},
    **{"num_gpus_per_node": 8, "trainer": "megatron"},
}


def test_each_machine_of_a_server_gets_a_bundle_of_its_gpus():
    judge = {"hf_checkpoint": "x", "num_gpus_per_engine": 4}
    config = config_of({**WIDE, **RAY, "sglang_models": {"judge": judge}})
    layout = run_layout(config, has_gpus=True)
    of_servers = [layout.bundles[slot.bundle] for slot in layout.servers]
    assert of_servers == [Bundle(CPUS, 8)] * 4 + [Bundle(CPUS, 4)]
    assert len({slot.bundle for slot in layout.servers}) == 5
    assert all(slot.gpus == tuple(range(8)) for slot in layout.servers[:4])
    names = [f"{fleet} {number}" for fleet, number in server_names(config)]
    assert names == [
        *("policy 0", "policy 0, machine 2,", "policy 1", "policy 1, machine 2,", "sglang_models.judge 0"),
    ]
    assert len(cluster_facts(config)["servers"]) == 5


def test_where_servers_take_turns_with_ranks_a_part_is_on_each_of_their_machines():
    settings = {**WIDE, **RAY, "actor_num_nodes": 4, "actor_num_gpus_per_node": 8, "colocate": True}
    layout = run_layout(config_of(settings), has_gpus=True)
    assert [slot.bundle for slot in layout.servers] == [0, 1, 2, 3]
    assert len(layout.bundles) == 4
    # Machines are taken in order, so parts of one server are on neighbours.
    placed = [PlacedBundle(f"n{n}", f"10.0.0.{n}", tuple(map(str, range(8)))) for n in (3, 1, 4, 2)]
    allocations = layout.allocations(placed, "n1")
    assert [place.host for place in allocations.servers] == [f"10.0.0.{n}" for n in (1, 2, 3, 4)]
    assert {place.devices for place in allocations.servers} == {tuple("01234567")}


def test_a_placeholder_keeps_gpus_free_and_starts_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    groups = [
        {"worker_type": "placeholder", "num_engines": 2, "num_gpus_per_engine": 1},
        {"num_engines": 2, "num_gpus_per_engine": 2},
    ]
    own = {"engine": "sglang", "trainer": "megatron", "sglang_groups": groups}
    judge = {"judge": {"hf_checkpoint": "x", "num_gpus_per_engine": 1}}
    config = config_of({**own, "sglang_models": judge})
    engine = config.engine
    assert (engine.has_router, engine.num_policy_gpus, len(engine.groups)) == (True, 4, 1)
    places = local_servers(engine, ClusterConfig())
    assert places.fleets["policy"] == (("2", "3"), ("4", "5"))
    assert places.fleets["sglang_models.judge"] == (("6",),)
    names = [" ".join(name) for name in server_names(config)]
    assert names == ["policy (placeholder)"] * 2 + ["policy 0", "policy 1", "sglang_models.judge 0"]
    # In turns with four ranks: the servers are on the last two of their GPUs.
    few = [{**groups[0], "num_engines": 1, "num_gpus_per_engine": 2}, {**groups[1], "num_engines": 1}]
    settings = {**own, **RAY, "sglang_groups": few, "actor_num_gpus_per_node": 4, "colocate": True}
    layout = run_layout(config_of(settings), has_gpus=True)
    assert [slot.gpus for slot in layout.servers] == [(0, 1), (2, 3)]
    assert len(layout.bundles) == 1


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([{"worker_type": "placeholder"}], "placeholders alone; add a group of servers"),
        ([{}, {"worker_type": "placeholder", "sglang": {"tp_size": 2}}], "a placeholder starts no server"),
        ([{"worker_type": "prefill"}, {"worker_type": "placeholder"}], "servers that are prefill cannot"),
    ],
)
def test_placeholders_that_make_no_sense(groups, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of({"engine": "sglang", "sglang_groups": groups})


def test_one_that_fits_on_a_machine_is_on_one():
    for per_node in (None, 16, 32):
        engine = EngineConfig(engine="sglang", rollout_num_gpus_per_engine=16, num_gpus_per_node=per_node)
        (needs,) = needs_of(engine, ClusterConfig()).values()
        assert [(each.gpus, each.machine) for each in needs] == [(16, 0)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"cluster": "local"},
            "16 GPUs is spread over 2 machines of num_gpus_per_node = 8; add cluster = ray",
        ),
        ({"rollout_num_gpus_per_engine": 12}, "a server of 12 GPUs cannot have as many on each machine"),
        ({"sglang": {"nnodes": 2}}, "`nnodes` is set by agentrl: set num_gpus_per_node"),
        ({"sglang": {"dist_init_addr": "x:1"}}, "`dist_init_addr` is set by agentrl: set num_gpus_per_node"),
        (
            {
                "rollout_num_engines": 1,
                "sglang_groups": [{"worker_type": "prefill"}, {"worker_type": "decode"}],
            },
            "a server that only runs prefill is on one machine; give it 8 GPUs at most",
        ),
    ],
)
async def test_what_cannot_be_spread_is_one_sentence(tmp_path, monkeypatch, changes, sentence):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))

    async def planned():
        config = config_of({**WIDE, **RAY, **changes, "sglang_python": sys.executable})
        needs_of(config.engine, config.cluster)
        await plan_of(tmp_path, config.engine).commands()

    with pytest.raises(ConfigError, match=sentence):
        await planned()


def plan_of(folder, engine: EngineConfig) -> FleetPlan:
    return FleetPlan(model=folder, config=engine, folder=folder, on_event=print)


async def test_the_commands_of_all_machines_differ_in_their_rank_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    engine = EngineConfig(
        engine="sglang", rollout_num_gpus_per_engine=24, num_gpus_per_node=8, sglang_python=sys.executable
    )
    commands = await plan_of(tmp_path, engine).commands()
    assert list(commands) == [f"group 1, machine {n} of 3" for n in (1, 2, 3)]
    meetings = set()
    for rank, command in enumerate(commands.values()):
        words = " ".join(command)
        assert f"--nnodes 3 --node-rank {rank} " in words
        assert "--tp-size=24" in words
        meetings.add(re.search(r"--dist-init-addr (127\.0\.0\.1:\d+)", words)[1])
    assert len(meetings) == 1
    assert not list(tmp_path.iterdir()), "nothing is written to look at a command"


@pytest.mark.full
async def test_sglang_itself_reads_what_starts_each_machine(tmp_path):
    engine = EngineConfig(
        engine="sglang",
        rollout_num_gpus_per_engine=16,
        num_gpus_per_node=8,
        sglang_python=str(sglang_python()),
    )
    model = save_tiny(tmp_path / "model")
    commands = await plan_of(model, engine).commands()
    code = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
read = parser.parse_args(sys.argv[1:])
print(json.dumps([read.nnodes, read.node_rank, read.tp_size, read.dist_init_addr]))
"""
    found = []
    for command in commands.values():
        words = command[command.index("sglang.launch_server") + 1 :]
        out = subprocess.run([command[0], "-c", code, *words], capture_output=True, text=True, check=True)
        found.append(json.loads(out.stdout.splitlines()[-1]))
    assert [each[:3] for each in found] == [[2, 0, 16], [2, 1, 16]]
    assert len({each[3] for each in found}) == 1
