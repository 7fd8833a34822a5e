"""Laws of the placement: whatever is asked for, no GPU is counted twice, and neighbours are neighbours."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.placement import (
    Bundle,
    PlacedBundle,
    RankNeeds,
    ServerNeeds,
    described,
    layout_of,
)

COUNTS = st.integers(1, 4)
RANKS = st.one_of(
    st.none(), st.builds(RankNeeds, COUNTS, COUNTS, st.sampled_from([0.5, 1.0, 4.0]), st.integers(0, 1))
)
SERVERS = st.lists(st.builds(ServerNeeds, st.sampled_from([1.0, 2.0]), st.integers(0, 4)), max_size=6)


@given(RANKS, SERVERS, st.booleans())
def test_no_gpu_is_counted_twice_and_every_process_has_what_it_needs(ranks, servers, colocate):
    layout = layout_of(ranks, servers, colocate=colocate)
    num_ranks = 0 if ranks is None else ranks.nodes * ranks.per_node
    assert (len(layout.ranks), len(layout.servers)) == (num_ranks, len(servers))
    for slots in (layout.ranks, layout.servers):
        taken = Counter((slot.bundle, gpu) for slot in slots for gpu in slot.gpus)
        assert set(taken.values()) <= {1}
        assert all(gpu < layout.bundles[bundle].gpus for bundle, gpu in taken)
    assert [len(slot.gpus) for slot in layout.servers] == [server.gpus for server in servers]
    if ranks is not None:
        assert {len(slot.gpus) for slot in layout.ranks} == {ranks.gpus}
    of_ranks, of_servers = ({slot.bundle for slot in slots} for slots in (layout.ranks, layout.servers))
    if not colocate:
        assert not of_ranks & of_servers
        assert sum(bundle.gpus for bundle in layout.bundles) == sum(
            len(slot.gpus) for slot in (*layout.ranks, *layout.servers)
        )


@given(RANKS, SERVERS, st.booleans())
def test_cpus_of_a_bundle_are_enough_for_all_in_it(ranks, servers, colocate):
    layout = layout_of(ranks, servers, colocate=colocate)
    needed = Counter()
    for slot in layout.ranks:
        needed[slot.bundle] += ranks.cpus
    for slot, server in zip(layout.servers, servers, strict=True):
        needed[slot.bundle] += server.cpus
    assert all(cpus <= layout.bundles[bundle].cpus for bundle, cpus in needed.items())
    assert set(needed) == set(range(len(layout.bundles)))


@given(RANKS, SERVERS, st.booleans(), st.integers(0, 2**32))
def test_allocations_are_those_of_equal_bundles_in_the_order_of_machines_and_devices(
    ranks, servers, colocate, seed
):
    layout, chance = layout_of(ranks, servers, colocate=colocate), random.Random(seed)
    free = {f"n{number}": [*map(str, range(40))] for number in range(3)}
    placed = []
    for bundle in layout.bundles:
        node = chance.choice(sorted(free))
        devices = chance.sample(free[node], bundle.gpus)
        free[node] = [device for device in free[node] if device not in devices]
        placed.append(PlacedBundle(node, f"10.0.0.{int(node[1:]) + 9}", tuple(devices)))
    allocations_of_ranks, allocations_of_servers = layout.allocations(placed, "n1")
    for slots, allocations in (
        (layout.ranks, allocations_of_ranks),
        (layout.servers, allocations_of_servers),
    ):
        for slot, allocation in zip(slots, allocations, strict=True):
            assert layout.bundles[allocation.bundle] == layout.bundles[slot.bundle]
            assert (allocation.node, allocation.host) == placed[allocation.bundle][:2]
            assert len(allocation.devices) == len(slot.gpus)
            assert set(allocation.devices) <= set(placed[allocation.bundle].devices)
        used = Counter(
            (allocation.node, device) for allocation in allocations for device in allocation.devices
        )
        assert set(used.values()) <= {1}
    order = [allocation.node for allocation in allocations_of_ranks]
    # The driver's machine first, then by address, 10.0.0.9 before 10.0.0.11.
    assert order == sorted(order, key=lambda node: (node != "n1", int(node[1:])))
    for one, two in pairwise(allocations_of_ranks):
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
    assert described([Bundle(4.0, 4), Bundle(4.0, 4), Bundle(1.0, 0)]) == "2 x (4 CPUs, 4 GPUs) + 1 CPU"
