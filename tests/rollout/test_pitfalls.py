"""What went wrong in other asynchronous trainers, at the producer. Each test names its pitfall.

Engines, corrections and whole runs have their own: `tests/engine`, `tests/algorithms`, `tests/flow`.
"""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from agentrl.errors import UserError
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import EarlyEnd, Producer, ProducerSettings
from agentrl.rollout.staleness import STALE, GroupPlaces, ReadyFirst, Window
from tests.rollout.test_producer import Rollouts, index_of


async def settled():
    """Let everything happen that needs no further event."""
    for _ in range(30):
        await asyncio.sleep(0)


class Held(Rollouts):
    """Groups that end when they are released."""

    def __init__(self, *held):
        super().__init__([0])
        self.events = {index: asyncio.Event() for index in held}

    async def play(self, prompt, version, begun=None):
        self.started[prompt.index] = version
        if prompt.index in self.events:
            try:
                await self.events[prompt.index].wait()
            except asyncio.CancelledError:
                self.cancelled.append(prompt.index)
                raise
        return await super().play(prompt, self.started[prompt.index])


async def test_one_group_that_fails_silently_does_not_leave_the_buffer_one_short():
    """SkyRL 1173: a buffer at 127 of 128 for 29 hours."""

    class Fails(Rollouts):
        async def play(self, prompt, version, begun=None):
            if prompt.index == 3:
                raise UserError("the key is wrong")
            return await super().play(prompt, version)

    producer = Fails([0]).producer(4, max_staleness=1)
    with pytest.raises(UserError, match="the key is wrong"):
        async with asyncio.timeout(5):
            await producer.take()
    # Started, neither trained nor dropped: a restart plays it again.
    assert 3 in producer.pending
    await producer.close()


async def test_one_straggler_does_not_wedge_a_step():
    """NeMo-RL 3238: strict first in, first out waits for it, a window goes on until it is used up."""
    rollouts = Held(1)
    producer = rollouts.producer(2, max_staleness=1, width=4)
    taken = [index_of(outcome) for outcome in await producer.take()]
    assert taken == [0, 2]
    producer.advance(1, version=1)
    # Two more may pass it: three in all.
    assert [index_of(outcome) for outcome in await producer.take()] == [3, 4]
    producer.advance(2, version=2)
    taking = asyncio.create_task(producer.take())
    await settled()
    assert not taking.done()
    assert producer.occupancy.blocked_by == "window"
    rollouts.events[1].set()
    outcomes = await taking
    assert [index_of(outcome) for outcome in outcomes] == [1, 5]
    assert producer.version - outcomes[0].group.start_version == 2 <= producer.policy.bound
    await producer.close()


async def test_after_an_update_all_free_places_are_filled_at_once():
    """prime-rl 1372: one out, one in, and the throughput collapses."""
    rollouts = Rollouts([0])
    producer = rollouts.producer(8, max_staleness=1)
    await producer.take()
    await settled()
    before = rollouts.prompts
    producer.advance(1, version=1)
    assert producer.occupancy.in_flight == rollouts.prompts - before == 8
    await producer.close()


async def test_nothing_is_counted_that_could_drift():
    """AReaL 1471, NeMo-RL 2651: what was dropped or cancelled gives its place back, also after a resume."""
    rollouts = Rollouts([1], bad={2, 9}, dropped=set(range(3, 30, 4)))
    producer = rollouts.producer(2, max_staleness=1, max_broken=10)
    producer.resume(version=5)
    for step in range(7, 15):
        await producer.take()
        producer.advance(step + 1, version=step - 1)
        await settled()
        places = producer.occupancy
        assert (places.taken, places.waiting) == (4, 4)
    assert len(await producer.close()) >= 4


async def test_a_run_ends_with_its_last_batch_and_plays_nothing_beyond_it():
    """prime-rl 3313, 1901: a livelock at the end of the run, a bound off by one."""
    rollouts = Rollouts([2], dropped={4})
    producer = rollouts.producer(2, max_staleness=3, num_batches=3)
    for step in range(3):
        assert sum(outcome.kept is not None for outcome in await producer.take()) == 2
        producer.advance(step + 1, version=step + 1)
    await settled()
    assert rollouts.prompts == 3 * 2 + 1
    assert (producer.pending, producer.occupancy.blocked_by) == ([], "end")
    assert await producer.close() == []


async def test_groups_that_ended_are_kept_while_others_are_trained():
    """slime 2238: finished groups were dropped by the worker."""
    rollouts = Rollouts([0])
    producer = rollouts.producer(2, max_staleness=2, width=2)
    await settled()
    taken = []
    for step in range(5):
        taken += [index_of(outcome) for outcome in await producer.take()]
        await settled()
        producer.advance(step + 1, version=step + 1)
    await settled()
    rest = [index_of(outcome) for outcome in await producer.close()]
    assert sorted([*taken, *rest]) == list(range(rollouts.prompts))


async def test_the_driver_holds_no_more_groups_than_there_are_places():
    """verl-omni 402: 379 GB in the driver."""
    alive = weakref.WeakSet()

    class Watched(Rollouts):
        async def play(self, prompt, version, begun=None):
            outcome = await super().play(prompt, version)
            group = type("Group", (), {"id": outcome.group.id, "start_version": version})()
            alive.add(group)
            return GroupOutcome(group, (), ())

    producer = Watched([0]).producer(3, max_staleness=1)
    for step in range(20):
        await producer.take()
        producer.advance(step + 1, version=step + 1)
        await settled()
    gc.collect()
    assert len(alive) <= producer.policy.capacity
    await producer.close()


async def test_long_episodes_are_trained_as_often_as_they_were_asked_for():
    """tinker-cookbook 822: a problem that takes more than K steps is never trained on."""
    # Every fifth group takes as long as four batches.
    ticks = [400, 1, 1, 1, 1]

    async def lengths(policy):
        rollouts = Rollouts(ticks)
        cut = GroupOutcome(None, (), ())
        producer = Producer(
            rollouts.prompt, rollouts.play, ProducerSettings(4), policy, EarlyEnd(lambda _: cut)
        )
        taken = []
        for step in range(40):
            taken += [o.group.id for o in await producer.take() if o.kept is not None]
            for _ in range(100):
                await asyncio.sleep(0)
            producer.advance(step + 1, version=step + 1)
        await producer.close()
        return sum(int(name[1:]) % 5 == 0 for name in taken) / len(taken)

    assert await lengths(Window(GroupPlaces(1, 4), 4)) == pytest.approx(0.2, abs=0.03)
    # Which is why taking the first to end is not the default.
    assert await lengths(ReadyFirst(GroupPlaces(1, 4))) < 0.1


async def test_stale_groups_are_dropped_with_their_reason_and_give_their_places_back():
    rollouts = Held(0)
    cut = GroupOutcome(None, (), ())
    producer = Producer(
        rollouts.prompt,
        rollouts.play,
        ProducerSettings(2),
        ReadyFirst(GroupPlaces(1, 2)),
        early=EarlyEnd(lambda _: cut),
    )
    stale = []
    for step in range(4):
        outcomes = await producer.take()
        stale += [outcome.reason for outcome in outcomes if outcome.kept is None]
        for outcome in outcomes:
            assert outcome.kept is None or producer.version - outcome.group.start_version <= 1
        await settled()
        producer.advance(step + 1, version=step + 1)
    assert (stale, rollouts.cancelled) == ([STALE], [0])
    assert producer.occupancy.taken <= producer.policy.capacity
    await producer.close()
