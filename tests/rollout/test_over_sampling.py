"""An over-sampled batch takes the groups that end first; each prompt that was started comes out once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError, WorldBrokenError
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.over_sampling import NOT_CHOSEN, OVER_SAMPLED, OverSampling, OverSamplingProducer
from agentrl.rollout.producer import ProducerSettings
from tests.rollout.test_producer import Rollouts, broken, index_of


def cut(prompt):
    """The outcome of a cancelled group: its aborted episode."""
    return GroupOutcome(None, (), broken(prompt.index).failed)


def producer_of(rollouts, batch_size, size, choose=None, **options):
    over_sampling = OverSampling(size, cut, choose)
    settings = ProducerSettings(batch_size, **options)
    return OverSamplingProducer(rollouts.prompt, rollouts.play, settings, over_sampling)


def indices(outcomes, *, kept):
    of = {True: lambda o: o.kept is not None, False: lambda o: o.kept is None}[kept]
    names = [o.group.id if o.group else (o.finished or o.failed)[0].id for o in outcomes if of(o)]
    return [int(name.split("-")[0][1:]) for name in names]


async def test_the_first_groups_to_end_are_taken_in_the_order_of_their_start():
    rollouts = Rollouts([9, 1, 50, 3, 50])
    producer = producer_of(rollouts, 3, 5)
    outcomes = await producer.take()
    assert indices(outcomes, kept=True) == [0, 1, 3]
    assert [o.reason for o in outcomes] == ["", "", OVER_SAMPLED, "", OVER_SAMPLED]
    assert rollouts.cancelled == [2, 4]
    assert await producer.close() == []


async def test_its_places_are_the_prompts_that_start_at_a_time():
    rollouts = Rollouts([9, 1, 50, 3, 50])
    producer = producer_of(rollouts, 3, 5)
    taking = asyncio.create_task(producer.take())
    seen = set()
    while not taking.done():
        await asyncio.sleep(0)
        if producer.occupancy.in_flight:
            seen.add((producer.occupancy.capacity, producer.occupancy.taken))
    assert {capacity for capacity, _ in seen} == {5}
    assert max(taken for _, taken in seen) == 5
    await producer.close()


async def test_complete_groups_beyond_the_batch_are_over_sampled_too():
    rollouts = Rollouts([4])
    outcomes = await producer_of(rollouts, 2, 5).take()
    assert indices(outcomes, kept=True) == [0, 1]
    assert [(o.group is not None, o.reason) for o in outcomes[2:]] == [(True, OVER_SAMPLED)] * 3
    assert rollouts.cancelled == []


async def test_nothing_is_in_flight_between_two_batches_and_the_next_is_of_the_new_version():
    rollouts = Rollouts([1, 60])
    producer = producer_of(rollouts, 1, 2)
    await producer.take()
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert rollouts.prompts == 2
    producer.advance(1, version=1)
    await producer.take()
    assert rollouts.started == {0: 0, 1: 0, 2: 1, 3: 1}


async def test_more_prompts_start_only_where_those_in_flight_cannot_fill_the_batch():
    rollouts = Rollouts([1, 2, 3, 4], dropped={0, 1})
    outcomes = await producer_of(rollouts, 2, 4).take()
    assert rollouts.prompts == 4
    assert indices(outcomes, kept=True) == [2, 3]
    rollouts = Rollouts([1, 2, 3, 4], dropped={0, 1, 2})
    outcomes = await producer_of(rollouts, 2, 4).take()
    assert rollouts.prompts == 8
    assert [o.reason for o in outcomes[:3]] == ["equal"] * 3


TICKS = st.lists(st.integers(0, 9), min_size=1, max_size=7)
SOME = st.sets(st.integers(0, 25))


@given(st.integers(1, 4), st.integers(0, 4), TICKS, SOME, SOME, st.booleans())
def test_every_started_prompt_comes_out_once(batch_size, more, ticks, bad, dropped, chooses):
    def choose(groups, number):
        return groups[-number:]

    async def run():
        rollouts = Rollouts(ticks, bad, dropped)
        options = {"max_broken": 10_000, "max_num_gen_batches": 100}
        producer = producer_of(
            rollouts, batch_size, batch_size + more, choose if chooses else None, **options
        )
        returned = []
        for step in range(3):
            outcomes = await producer.take()
            assert len(indices(outcomes, kept=True)) == batch_size
            assert {rollouts.started[n] for n in indices(outcomes, kept=True)} == {step}
            returned += sorted(indices(outcomes, kept=True) + indices(outcomes, kept=False))
            producer.advance(step + 1, version=step + 1)
        assert returned == list(range(rollouts.prompts))
        assert await producer.close() == []
        if chooses:
            assert rollouts.cancelled == []

    asyncio.run(run())


@pytest.mark.parametrize("ticks", [[1], [5, 1, 3, 9], [0, 9]])
async def test_a_buffer_filter_waits_for_all_and_its_choice_does_not_depend_on_who_is_faster(ticks):
    seen = []

    def last(groups, number):
        seen.append([group.id for group in groups])
        return groups[-number:]

    rollouts = Rollouts(ticks, bad={0}, dropped={2})
    outcomes = await producer_of(rollouts, 2, 6, last).take()
    assert seen == [["g1", "g3", "g4", "g5"]]
    assert indices(outcomes, kept=True) == [4, 5]
    assert [o.reason for o in outcomes] == ["", NOT_CHOSEN, "equal", NOT_CHOSEN, "", ""]


@pytest.mark.parametrize(
    ("choose", "sentence"),
    [
        (lambda groups, number: groups[:1], r"2 of the 4 groups, each once, not 1 groups, 1 of them diff"),
        (lambda groups, number: [groups[0]] * 2, "not 2 groups, 1 of them different"),
        (lambda groups, number: None, "each once, not None"),
        (lambda groups, number: 1 / 0, "ZeroDivisionError"),
    ],
)
async def test_a_buffer_filter_that_cannot_work_ends_the_run_with_a_sentence(choose, sentence):
    producer = producer_of(Rollouts([1]), 2, 4, choose)
    with pytest.raises(UserError, match=f"the buffer filter failed .*{sentence}"):
        await producer.take()
    assert len(await producer.close()) == 4


@pytest.mark.parametrize(("limit", "num_played"), [(1, 4), (2, 8)])
async def test_a_run_without_signal_ends_with_a_sentence(limit, num_played):
    producer = producer_of(Rollouts([2], dropped=set(range(1, 1000))), 3, 4, max_num_gen_batches=limit)
    with pytest.raises(UserError, match=rf"{num_played} groups were played for a batch of 3, .* kept 1 "):
        await producer.take()
    assert len(await producer.close()) == num_played


async def test_broken_groups_in_a_row_end_it():
    with pytest.raises(WorldBrokenError, match="3 groups in a row could not be played"):
        await producer_of(Rollouts([1], bad=set(range(10))), 2, 4).take()


@pytest.mark.parametrize("number", [0, 5])
async def test_an_error_of_a_group_is_raised_and_the_rest_is_closed(number):
    """The first to end; and one that fails as it is cancelled, while another one ends."""

    class Raises(Rollouts):
        async def play(self, prompt, version, begun=None):
            try:
                if prompt.index == 0 == number:
                    raise UserError("set the key")
                return await super().play(prompt, version)
            except asyncio.CancelledError:
                if prompt.index == 4:
                    return GroupOutcome(None, (), broken(4).failed)
                if prompt.index == 5 == number:
                    raise UserError("set the key") from None
                raise

    rollouts = Raises([1, 1, 1, 1, 50, 50])
    producer = producer_of(rollouts, 2, 6)
    with pytest.raises(UserError, match="set the key"):
        await producer.take()
    leftover = await producer.close()
    ended = [index_of(o) if o.failed or o.group else 4 for o in leftover]
    assert len(ended) == len(set(ended))
    assert set(ended) <= {0, 1, 2, 3, 4}
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
