"""Groups start only within the allowed staleness, and are returned in the order of their start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Limits
from agentrl.data import Prompt
from agentrl.errors import UserError, WorldBrokenError
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import Producer, ProducerSettings
from agentrl.rollout.staleness import GroupPlaces, Window
from agentrl.types import Ending, Episode, Failure, Group
from tests.worlds import ASK, FOREVER_S


def broken(index):
    failure = Failure("reset", "error", f"no world {index}")
    episode = Episode(f"g{index}-0", "Env-v0", ASK, 0, Limits(), (), (), Ending.FAILED, failure)
    return GroupOutcome(None, (episode,), ())


@dataclass
class Rollouts:
    """Groups that take `ticks[i]` turns of the event loop. `bad` ones fail, a filter drops the `dropped`."""

    ticks: list[int]
    bad: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    started: dict[int, int] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    prompts: int = 0

    def prompt(self):
        self.prompts += 1
        return Prompt(self.prompts - 1, ASK, 0)

    async def play(self, prompt, version, begun=None):
        self.started[prompt.index] = version
        try:
            for _ in range(self.ticks[prompt.index % len(self.ticks)]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(prompt.index)
            raise
        if prompt.index in self.bad:
            return broken(prompt.index)
        group = Group(f"g{prompt.index}", ASK, 0, (), (), version)
        return GroupOutcome(group, (), (), "equal" if prompt.index in self.dropped else "")

    def producer(self, batch_size, *, max_staleness=0, width=1, **options):
        policy = Window(GroupPlaces(max_staleness, batch_size), width)
        return Producer(self.prompt, self.play, ProducerSettings(batch_size, **options), policy)


def index_of(outcome):
    name = outcome.group.id if outcome.group else outcome.failed[0].id.split("-")[0]
    return int(name[1:])


STALENESS = st.integers(0, 3)
TICKS = st.lists(st.integers(0, 9), min_size=1, max_size=7)
PAUSES = st.lists(st.integers(0, 9), max_size=5)


BATCHES = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5)


@st.composite
def policies(draw):
    batch_size = draw(st.integers(1, 4))
    places = GroupPlaces(draw(STALENESS), batch_size, draw(st.integers(1, 3)), draw(st.integers(0, 4)))
    return Window(places, draw(st.integers(1, 6)))


@given(policies(), TICKS, st.sets(st.integers(0, 25)), st.sets(st.integers(0, 25)), BATCHES)
def test_no_group_is_taken_later_than_the_bound_and_none_is_lost(policy, ticks, bad, dropped, batches):
    """batches: of each its duration, and whether its weights are other ones."""
    places = policy.places

    async def run():
        rollouts = Rollouts(ticks, bad, dropped)
        settings = ProducerSettings(places.batch_size, max_broken=10_000, max_num_gen_batches=1000)
        producer = Producer(rollouts.prompt, rollouts.play, settings, policy)
        taken, kept, version, is_new = [], [], 0, False
        for step, (pause, learned) in enumerate(batches):
            outcomes = await producer.take()
            groups = [outcome.kept for outcome in outcomes if outcome.kept is not None]
            assert len(groups) == places.batch_size
            for group in groups:
                assert 0 <= version - group.start_version <= policy.bound
            taken += [index_of(outcome) for outcome in outcomes]
            kept += [int(group.id[1:]) for group in groups]
            for _ in range(pause):
                assert producer.occupancy.taken <= policy.capacity
                assert sorted([*taken, *producer.pending]) == list(range(rollouts.prompts))
                await asyncio.sleep(0)
            is_new |= learned
            is_published = (step + 1) % places.updates == 0
            version += is_published and is_new
            is_new &= not is_published
            producer.advance(step + 1, version=version, is_published=is_published)
        leftover = [index_of(outcome) for outcome in await producer.close()]
        assert len({*taken, *leftover}) == len(taken) + len(leftover)
        if policy.width == 1:
            assert kept == sorted(kept)
        for k, ordinal in enumerate(kept):
            assert sum(later > ordinal for later in kept[:k]) < policy.width
        assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    asyncio.run(run())


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_the_bound_is_reached(staleness, width):
    """One straggler, and all others at once: as many pass it as the window allows."""
    rollouts, policy = Rollouts([0]), Window(GroupPlaces(staleness, 2), width)
    ended = asyncio.Event()

    async def play(prompt, version, begun=None):
        # The last one that starts before the first update.
        if prompt.index == policy.capacity - 1:
            await ended.wait()
        return await rollouts.play(prompt, version)

    producer = Producer(rollouts.prompt, play, ProducerSettings(2), policy)
    for step in range(1000):
        taking = asyncio.create_task(producer.take())
        await asyncio.wait([taking], timeout=0.02)
        if not taking.done():
            break
        producer.advance(step + 1, version=step + 1)
    ended.set()
    oldest = min(outcome.group.start_version for outcome in await taking)
    # N + ceil((W - 1) / P); at N = 0 there is no place for a group that could pass.
    expected = staleness + -(-(width - 1) // 2) if staleness else 0
    assert producer.version - oldest == policy.bound == expected
    await producer.close()


@given(st.integers(1, 4), TICKS, st.sets(st.integers(0, 25)), st.sets(st.integers(0, 25)))
def test_dropped_groups_are_replaced_and_which_are_taken_does_not_depend_on_who_is_faster(
    batch_size, ticks, bad, dropped
):
    async def run():
        rollouts = Rollouts(ticks, bad, dropped)
        producer = rollouts.producer(batch_size, max_broken=10_000, max_num_gen_batches=100)
        first = 0
        for step in range(4):
            outcomes = await producer.take()
            assert sum(outcome.kept is not None for outcome in outcomes) == batch_size
            # As if one group were played after the other.
            expected, last = 0, first
            while expected < batch_size:
                expected += last not in bad and last not in dropped
                last += 1
            assert [index_of(outcome) for outcome in outcomes] == list(range(first, last))
            assert rollouts.prompts == last
            first = last
            producer.advance(step + 1, version=step + 1)
        await producer.close()

    asyncio.run(run())


@pytest.mark.parametrize(("limit", "num_played"), [(1, 3), (2, 6), (5, 15)])
async def test_a_run_without_signal_ends_with_a_sentence(limit, num_played):
    rollouts = Rollouts([2], dropped=set(range(1, 1000)))
    producer = rollouts.producer(3, max_num_gen_batches=limit)
    sentence = rf"{num_played} groups were played for a batch of 3, .* kept 1 \(equal: {num_played - 1}\)"
    with pytest.raises(UserError, match=sentence):
        await producer.take()
    assert len(await producer.close()) == num_played


@given(st.integers(1, 4), STALENESS)
def test_as_many_groups_are_in_flight_as_may_be(batch_size, staleness):
    async def run():
        rollouts = Rollouts([0])
        producer = rollouts.producer(batch_size, max_staleness=staleness)
        for step in range(4):
            await producer.take()
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(rollouts.started) == (step + staleness + 1) * batch_size
            producer.advance(step + 1, version=step + 1)
        await producer.close()

    asyncio.run(run())


async def test_at_staleness_zero_nothing_starts_before_the_weights_are_published():
    rollouts = Rollouts([0])
    producer = rollouts.producer(2)
    await producer.take()
    waiting = asyncio.create_task(producer.take())
    for _ in range(20):
        await asyncio.sleep(0)
    assert rollouts.started == {0: 0, 1: 0}
    waiting.cancel()


async def test_batches_are_ordered_by_start_not_by_finish():
    rollouts = Rollouts([9, 0, 5, 0])
    producer = rollouts.producer(4)
    assert [index_of(outcome) for outcome in await producer.take()] == [0, 1, 2, 3]


async def test_all_groups_of_a_batch_play_at_the_same_time():
    together = asyncio.Barrier(3)

    class Meeting(Rollouts):
        async def play(self, prompt, version, begun=None):
            await together.wait()
            return await super().play(prompt, version)

    async with asyncio.timeout(5):
        assert len(await Meeting([0]).producer(3).take()) == 3


async def test_a_broken_group_is_replaced_and_returned_with_the_complete_ones():
    rollouts = Rollouts([0], bad={1, 3})
    outcomes = await rollouts.producer(3, max_broken=3).take()
    assert [index_of(outcome) for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.group is None for outcome in outcomes] == [False, True, False, True, False]


async def test_a_replacement_is_played_by_the_policy_that_serves_when_it_starts():
    rollouts = Rollouts([0], bad={3})
    producer = rollouts.producer(2, max_staleness=1)
    await producer.take()
    producer.advance(1, version=1)
    await producer.take()
    assert rollouts.started == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 1}
    await producer.close()


async def test_a_group_has_the_versions_that_served_at_its_start_and_at_its_end():
    producer = Rollouts([0, 0, 9, 9]).producer(2, max_staleness=1)
    first = await producer.take()
    producer.advance(1, version=1)
    second = await producer.take()
    versions = [(outcome.group.start_version, outcome.group.end_version) for outcome in (*first, *second)]
    assert versions == [(0, None), (0, None), (0, 1), (0, 1)]
    await producer.close()


async def test_max_broken_groups_in_a_row_raise_an_error():
    rollouts = Rollouts([0], bad={1, 2, 3})
    with pytest.raises(WorldBrokenError) as caught:
        await rollouts.producer(2, max_broken=3).take()
    message = str(caught.value)
    assert message.startswith(
        "Env-v0: 3 groups in a row could not be played (last: reset failed: no world 3)"
    )
    assert "mend the environment" in message
    assert rollouts.prompts == 4


async def test_a_complete_group_resets_the_count_of_broken_ones():
    rollouts = Rollouts([0], bad={0, 1, 3, 4})
    outcomes = await rollouts.producer(2, max_broken=3).take()
    assert [outcome.group is None for outcome in outcomes] == [True, True, False, True, True, False]


async def test_an_older_version_has_no_effect():
    rollouts = Rollouts([0])
    producer = rollouts.producer(1)
    await producer.take()
    producer.advance(2, version=2)
    producer.advance(1, version=1)
    await producer.take()
    assert rollouts.started[1] == 2
    await producer.close()


async def test_closing_cancels_what_is_in_flight_and_waits_until_it_is_clean():
    cleaned = []

    class Slow(Rollouts):
        async def play(self, prompt, version, begun=None):
            try:
                await asyncio.sleep(FOREVER_S)
            finally:
                await asyncio.sleep(0)
                cleaned.append(prompt.index)

    rollouts = Slow([0])
    producer = rollouts.producer(3)
    taking = asyncio.create_task(producer.take())
    for _ in range(5):
        await asyncio.sleep(0)
    await producer.close()
    assert sorted(cleaned) == [0, 1, 2]
    with pytest.raises(asyncio.CancelledError):
        await taking
    await producer.close()


async def test_an_exception_of_a_group_is_raised_by_take_and_the_rest_can_be_closed():
    class Raises(Rollouts):
        async def play(self, prompt, version, begun=None):
            if prompt.index == 1:
                raise KeyError("x")
            return await super().play(prompt, version)

    rollouts = Raises([50])
    producer = rollouts.producer(3)
    taking = asyncio.create_task(producer.take())
    await asyncio.sleep(0)
    with pytest.raises(KeyError):
        await taking
    await producer.close()
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


async def test_close_returns_the_groups_that_had_ended():
    rollouts = Rollouts(ticks=[0], bad={1, 2, 3})
    producer = rollouts.producer(2)
    with pytest.raises(WorldBrokenError):
        await producer.take()
    leftover = await producer.close()
    assert [index_of(outcome) for outcome in leftover] == [0, 1, 2, 3]
    assert await producer.close() == []


async def test_a_batch_that_brought_no_version_admits_the_next_against_the_same_weights():
    rollouts = Rollouts([0])
    producer = rollouts.producer(2)
    await producer.take()
    producer.advance(1, version=0)
    await producer.take()
    assert producer.version == 0
    assert rollouts.started == {0: 0, 1: 0, 2: 0, 3: 0}
    producer.advance(2, version=1)
    await producer.take()
    assert rollouts.started[4] == rollouts.started[5] == producer.version == 1
    await producer.close()
