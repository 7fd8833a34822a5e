"""Laws of the placement: whatever is asked for, no GPU is counted twice, and neighbours are neighbours."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import SingleTurnEnv
from agentrl.assembly.cluster import check_machines, player_needs
from agentrl.assembly.load import load_config
from agentrl.errors import ConfigError, UserError
from agentrl.processes.placement import (
    Bundle,
    PlacedBundle,
    PlayerNeeds,
    RankNeeds,
    ServerNeeds,
    described,
    layout_of,
)
from agentrl.processes.ray.placement import _has_room
from agentrl.types import Resources

COUNTS = st.integers(1, 4)
RANKS = st.one_of(
    st.none(), st.builds(RankNeeds, COUNTS, COUNTS, st.sampled_from([0.5, 1.0, 4.0]), st.integers(0, 1))
)
PLAYERS = st.lists(
    st.builds(PlayerNeeds, st.sampled_from([0.5, 1.0]), st.integers(0, 2), st.sampled_from([0, 10**9])),
    max_size=4,
)
SERVERS = st.lists(st.builds(ServerNeeds, st.sampled_from([1.0, 2.0]), st.integers(0, 4)), max_size=6)


@given(RANKS, SERVERS, PLAYERS, st.booleans())
def test_no_gpu_is_counted_twice_and_every_process_has_what_it_needs(ranks, servers, players, colocate):
    layout = layout_of(ranks, servers, players, colocate=colocate)
    num_ranks = 0 if ranks is None else ranks.nodes * ranks.per_node
    assert (len(layout.ranks), len(layout.servers)) == (num_ranks, len(servers))
    assert [layout.bundles[slot.bundle] for slot in layout.players] == [Bundle(*player) for player in players]
    for slots in (layout.ranks, layout.servers, layout.players):
        taken = Counter((slot.bundle, gpu) for slot in slots for gpu in slot.gpus)
        assert set(taken.values()) <= {1}
        assert all(gpu < layout.bundles[bundle].gpus for bundle, gpu in taken)
    assert [len(slot.gpus) for slot in layout.servers] == [server.gpus for server in servers]
    if ranks is not None:
        assert {len(slot.gpus) for slot in layout.ranks} == {ranks.gpus}
    of_ranks, of_servers, of_players = (
        {slot.bundle for slot in slots} for slots in (layout.ranks, layout.servers, layout.players)
    )
    assert not of_players & (of_ranks | of_servers)
    if not colocate:
        assert not of_ranks & of_servers
        assert sum(bundle.gpus for bundle in layout.bundles) == sum(
            len(slot.gpus) for slot in (*layout.ranks, *layout.servers, *layout.players)
        )


@given(RANKS, SERVERS, PLAYERS, st.booleans(), st.integers(0, 30))
def test_one_machine_hands_out_each_gpu_once_or_as_few_as_possible_twice(
    ranks, servers, players, colocate, spare
):
    layout = layout_of(ranks, servers, players, colocate=colocate)
    own = [f"g{number}" for number in range(layout.least_gpus + spare)]
    gpus = layout.on_one_machine(own)
    assert [len(each) for each in gpus.ranks] == [len(slot.gpus) for slot in layout.ranks]
    assert [len(each) for each in gpus.servers] == [server.gpus for server in servers]
    assert [len(each) for each in gpus.players] == [player.gpus for player in players]
    of_ranks = Counter(gpu for each in gpus.ranks for gpu in each)
    of_others = Counter(gpu for each in (*gpus.servers, *gpus.players) for gpu in each)
    assert {*of_ranks.values(), *of_others.values()} <= {1}
    assert {*of_ranks, *of_others} <= {*own}
    assert set(gpus.shared) == of_ranks.keys() & of_others.keys()
    if not colocate:
        missing = of_ranks.total() + of_others.total() - len(own)
        assert len(gpus.shared) == max(0, missing)
        assert [*of_ranks] == own[: len(of_ranks)]


@given(RANKS, SERVERS, PLAYERS, st.booleans())
def test_cpus_of_a_bundle_are_enough_for_all_in_it(ranks, servers, players, colocate):
    layout = layout_of(ranks, servers, players, colocate=colocate)
    needed = Counter()
    for slot in layout.ranks:
        needed[slot.bundle] += ranks.cpus
    for slot, server in zip(layout.servers, servers, strict=True):
        needed[slot.bundle] += server.cpus
    for slot, player in zip(layout.players, players, strict=True):
        needed[slot.bundle] += player.cpus
    assert all(cpus <= layout.bundles[bundle].cpus for bundle, cpus in needed.items())
    assert set(needed) == set(range(len(layout.bundles)))


@given(RANKS, SERVERS, PLAYERS, st.booleans(), st.integers(0, 2**32))
def test_allocations_are_those_of_equal_bundles_in_the_order_of_machines_and_devices(
    ranks, servers, players, colocate, seed
):
    layout, chance = layout_of(ranks, servers, players, colocate=colocate), random.Random(seed)
    free = {f"n{number}": [*map(str, range(40))] for number in range(3)}
    placed = []
    for bundle in layout.bundles:
        node = chance.choice(sorted(free))
        devices = chance.sample(free[node], bundle.gpus)
        free[node] = [device for device in free[node] if device not in devices]
        placed.append(PlacedBundle(node, f"10.0.0.{int(node[1:]) + 9}", tuple(devices)))
    allocated = layout.allocations(placed, "n1")
    for slots, allocations in zip((layout.ranks, layout.servers, layout.players), allocated, strict=True):
        for slot, allocation in zip(slots, allocations, strict=True):
            assert layout.bundles[allocation.bundle] == layout.bundles[slot.bundle]
            assert (allocation.node, allocation.host) == placed[allocation.bundle][:2]
            assert len(allocation.devices) == len(slot.gpus)
            assert allocation.has_bundle == (slot.bundle not in {rank.bundle for rank in layout.ranks})
            assert set(allocation.devices) <= set(placed[allocation.bundle].devices)
        used = Counter(
            (allocation.node, device) for allocation in allocations for device in allocation.devices
        )
        assert set(used.values()) <= {1}
    order = [allocation.node for allocation in allocated.ranks]
    # The driver's machine first, then by address, 10.0.0.9 before 10.0.0.11.
    assert order == sorted(order, key=lambda node: (node != "n1", int(node[1:])))
    for one, two in pairwise(allocated.ranks):
        if one.bundle == two.bundle and one.devices:
            assert int(one.devices[0]) < int(two.devices[0])


def test_colocated_servers_use_the_gpus_of_the_ranks_one_after_the_other():
    layout = layout_of(RankNeeds(2, 4, 1.0, 1), [ServerNeeds(1.0, 2)] * 3, colocate=True)
    assert layout.bundles == (Bundle(6.0, 4), Bundle(6.0, 4))
    assert [(slot.bundle, slot.gpus) for slot in layout.servers] == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1))]
    # One that no bundle of the ranks holds has its own.
    larger = layout_of(RankNeeds(1, 2, 1.0, 1), [ServerNeeds(1.0, 4), ServerNeeds(1.0, 0)], colocate=True)
    assert larger.bundles == (Bundle(2.0, 2), Bundle(1.0, 4), Bundle(1.0, 0))


def test_bundles_in_words():
    bundles = [Bundle(4.0, 4), Bundle(4.0, 4), Bundle(1.0, 0), Bundle(2.0, 0, 8 * 10**9)]
    assert described(bundles) == "2 x (4 CPUs, 4 GPUs) + 1 CPU + (2 CPUs, 8 GB of memory)"


def test_players_take_what_their_environment_asks_for_unless_the_run_says_otherwise():
    settings = {"env": f"{__name__}:Heavy", "num_rollout_workers": 2, "cluster": "ray"}
    needs = player_needs(load_config(None, settings))
    assert needs == [PlayerNeeds(4.0, 1, 8 * 10**9)] * 2
    needs = player_needs(load_config(None, {**settings, "num_cpus_per_rollout_worker": 0.5}))
    assert needs == [PlayerNeeds(0.5, 1, 8 * 10**9)] * 2
    assert player_needs(load_config(None, {**settings, "num_rollout_workers": 0})) == []


class Heavy(SingleTurnEnv):
    """An environment whose processes are large."""

    resources = Resources(num_cpus=4, num_gpus=1, memory_gb=8)

    def tasks(self, split):
        return []


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        ({"num_cpu": 4}, "`resources` has no resource 'num_cpu'. Did you mean `num_cpus`?"),
        ({"num_cpus": 0}, "`resources` is wrong: num_cpus must be above 0, got 0"),
        ({"num_gpus": 0.5}, "num_gpus must be a count of 0 or more, got 0.5"),
        ({"memory_gb": -1}, "memory_gb must be 0 or more, got -1"),
        (4, '`resources` is 4 (int); write resources = {"num_cpus": 2}'),
    ],
)
def test_resources_that_are_wrong_are_refused_when_the_class_is_made(resources, sentence):
    with pytest.raises(UserError) as caught:
        type("Wrong", (SingleTurnEnv,), {"resources": resources})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "environment", "sentence"),
    [
        ({"actor_num_nodes": 2}, {}, "actor_num_nodes = 2 needs cluster = ray, which"),
        ({}, {"WORLD_SIZE": "2"}, "WORLD_SIZE is in the environment; start"),
        (
            {"cluster": "ray"},
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE is in the environment; start",
        ),
        ({"cluster": "ray", "ray_env_vars": ["X_Y"]}, {}, "ray_env_vars names X_Y, which is not set"),
    ],
)
def test_machines_that_nothing_would_start_ranks_on_are_refused(settings, environment, sentence):
    config = load_config(None, {"env": "Calculator-v0", "trainer": "megatron", **settings})
    with pytest.raises(ConfigError, match=sentence):
        check_machines(config, environment)


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ({"trainer": "megatron"}, {"WORLD_SIZE": "1"}),
        ({"trainer": "megatron", "actor_num_nodes": 2, "cluster": "ray"}, {}),
        ({"trainer": "torch"}, {"WORLD_SIZE": "2"}),
    ],
)
def test_other_machines_are_not(settings, environment):
    check_machines(load_config(None, {"env": "Calculator-v0", **settings}), environment)


async def test_the_wait_for_room_ends_with_a_signal():
    """A handler of a signal cancels the task, which blocks its event loop meanwhile."""
    waits = []

    def wait(seconds):
        waits.append(seconds)
        time.sleep(0.02)

    async def placing():
        return _has_room(SimpleNamespace(wait=wait), 60.0)

    task = asyncio.create_task(placing())
    threading.Timer(0.1, task.cancel).start()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(waits) >= 2
    assert max(waits) <= 1.0
    assert not _has_room(SimpleNamespace(wait=wait), 0.1)
    assert _has_room(SimpleNamespace(wait=lambda seconds: True), 60.0)
