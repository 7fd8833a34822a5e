"""A rollout function decides what is played, and which groups count; each prompt comes out once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EngineError, UserError, WorldBrokenError
from agentrl.rollout.over_sampling import NOT_CHOSEN
from agentrl.rollout.own_rollout import FunctionProducer, check_rollout
from agentrl.rollout.producer import EarlyEnd, ProducerSettings
from tests.rollout.test_over_sampling import cut, indices
from tests.rollout.test_producer import Rollouts


def producer_of(rollouts, function, batch_size=2, **options):
    settings = ProducerSettings(batch_size, **options)
    return FunctionProducer(rollouts.prompt, rollouts.play, settings, function, EarlyEnd(cut))


async def plain(rollout):
    """As a run plays without a function."""
    groups = await asyncio.gather(*(rollout.play() for _ in range(rollout.size)))
    return [group for group in groups if group is not None]


async def test_it_returns_groups_that_it_played_and_the_batch_is_in_the_order_of_their_prompts():
    async def backwards(rollout):
        prompts = [rollout.prompt() for _ in range(rollout.size)]
        return [await rollout.play(prompt) for prompt in reversed(prompts)]

    rollouts = Rollouts([3, 1])
    producer = producer_of(rollouts, backwards, 3)
    assert [outcome.group.id for outcome in await producer.take()] == ["g0", "g1", "g2"]
    assert [*rollouts.started] == [2, 1, 0]
    producer.advance(1, version=1)
    assert indices(await producer.take(), kept=True) == [3, 4, 5]
    assert rollouts.started[3] == 1
    assert producer.pending == []
    assert await producer.close() == []


async def test_it_knows_the_iteration():
    steps = []

    async def noted(rollout):
        steps.append((rollout.step, rollout.size))
        return await plain(rollout)

    producer = FunctionProducer(
        *((r := Rollouts([1])).prompt, r.play, ProducerSettings(2), noted, EarlyEnd(cut)), step=7
    )
    await producer.take()
    await producer.take()
    assert steps == [(8, 2), (9, 2)]


async def test_what_it_does_not_return_is_dropped_whether_played_in_play_or_drawn_alone():
    async def wasteful(rollout):
        rollout.prompt()  # 0
        first = await rollout.play()  # 1
        slow = asyncio.create_task(rollout.play())  # 2
        await asyncio.sleep(0)
        others = [await rollout.play() for _ in range(2)]  # 3, 4
        del slow
        return [first, others[1]]

    rollouts = Rollouts([0, 0, 10**6, 0, 0])
    outcomes = await producer_of(rollouts, wasteful).take()
    assert indices(outcomes, kept=True) == [1, 4]
    assert [(outcome.ordinal, outcome.reason) for outcome in outcomes if outcome.kept is None] == [
        (0, NOT_CHOSEN),
        (2, NOT_CHOSEN),
        (3, NOT_CHOSEN),
    ]
    assert rollouts.cancelled == [2]


async def test_workers_that_it_leaves_running_play_nothing_more():
    left = []

    async def works(rollout):
        groups = []

        async def work():
            while True:
                groups.append(await rollout.play())

        left.extend(asyncio.create_task(work()) for _ in range(3))
        while len(groups) < rollout.size:
            await asyncio.sleep(0)
        return groups[: rollout.size]

    rollouts = Rollouts([1])
    producer = producer_of(rollouts, works)
    outcomes = await asyncio.wait_for(producer.take(), 30)
    assert len(indices(outcomes, kept=True)) == 2
    drawn = rollouts.prompts
    ended = await asyncio.gather(*left, return_exceptions=True)
    assert {type(error) for error in ended} == {UserError}
    assert all("its batch is over" in str(error) for error in ended)
    assert rollouts.prompts == drawn == len(outcomes)
    assert len(indices(await producer.take(), kept=True)) == 2
    await asyncio.gather(*left, return_exceptions=True)


async def test_what_the_filter_drops_or_cannot_be_played_is_none():
    seen = []

    async def until_enough(rollout):
        groups = []
        while len(groups) < rollout.size:
            group = await rollout.play()
            seen.append(group and group.id)
            groups += [group] if group is not None else []
        return groups

    outcomes = await producer_of(Rollouts([1], bad={1}, dropped={0, 3}), until_enough).take()
    assert seen == [None, None, "g2", None, "g4"]
    assert indices(outcomes, kept=True) == [2, 4]
    assert [outcome.reason for outcome in outcomes] == ["equal", "", "", "equal", ""]


async def test_a_search_without_end_ends_with_a_sentence():
    async def forever(rollout):
        while True:
            await rollout.play()

    with pytest.raises(UserError, match="4 groups were played for a batch of 2, and the filter kept 0"):
        await producer_of(Rollouts([1], dropped=set(range(99))), forever, max_num_gen_batches=2).take()
    with pytest.raises(WorldBrokenError):
        await producer_of(Rollouts([1], bad=set(range(99))), forever, max_broken=3).take()


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda played: played[:1], "returns 2 of the 3 groups, each once, not 1 groups"),
        (lambda played: [played[0]] * 2, "each once, not 2 groups, 1 of them different"),
        (lambda played: None, "not None"),
        (lambda played: "ab", "not 'ab'"),
    ],
)
async def test_other_groups_than_so_many_are_one_sentence(returned, sentence):
    async def function(rollout):
        return returned([await rollout.play() for _ in range(3)])

    with pytest.raises(UserError, match=f"the rollout function failed .*{sentence}.*; mend it"):
        await producer_of(Rollouts([1]), function).take()


async def test_a_group_of_an_earlier_batch_is_none_of_this():
    kept = []

    async def again(rollout):
        kept.extend(await plain(rollout))
        return kept[: rollout.size]

    producer = producer_of(Rollouts([1]), again)
    await producer.take()
    with pytest.raises(UserError, match="the rollout function failed"):
        await producer.take()


async def test_a_prompt_is_played_once():
    async def twice(rollout):
        prompt = rollout.prompt()
        await rollout.play(prompt)
        await rollout.play(prompt)

    with pytest.raises(UserError, match="prompt 0 was played before"):
        await producer_of(Rollouts([1]), twice).take()


async def test_an_engine_that_fails_ends_the_run_though_the_function_goes_on():
    class Failing(Rollouts):
        async def play(self, prompt, version, begun=None):
            raise EngineError("it is gone.")

    async def stubborn(rollout):
        while True:
            try:
                return [await rollout.play() for _ in range(rollout.size)]
            except EngineError:
                if rollout.prompt().index > 5:
                    raise

    with pytest.raises(EngineError, match="it is gone"):
        await producer_of(Failing([1]), stubborn).take()


async def test_closing_cancels_what_is_in_play():
    async def waits(rollout):
        await rollout.play()
        return []

    rollouts = Rollouts([10**6])
    producer = producer_of(rollouts, waits)
    taking = asyncio.create_task(producer.take())
    await asyncio.sleep(0.01)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert producer.pending == [0]
    await producer.stop()
    assert await producer.close() == []
    assert rollouts.cancelled == [0]


PLANS = st.lists(st.lists(st.sampled_from(["draw", "play", "start"]), max_size=6), min_size=1, max_size=3)


@given(
    PLANS, st.lists(st.integers(0, 9), min_size=1, max_size=7), st.sets(st.integers(0, 25)), st.integers(1, 3)
)
def test_every_drawn_prompt_comes_out_once(plans, ticks, dropped, batch_size):
    async def run():
        rollouts = Rollouts(ticks, dropped=dropped)
        plan = iter(plans)

        async def function(rollout):
            tasks, groups = [], []
            for action in next(plan):
                if action == "draw":
                    rollout.prompt()
                elif action == "play":
                    groups.append(await rollout.play())
                else:
                    tasks.append(asyncio.create_task(rollout.play()))
            while len([group for group in groups if group is not None]) < batch_size:
                groups.append(await rollout.play())
            return [group for group in groups if group is not None][-batch_size:]

        producer = producer_of(rollouts, function, batch_size, max_num_gen_batches=100)
        returned = Counter()
        for step in range(len(plans)):
            outcomes = await producer.take()
            assert len(indices(outcomes, kept=True)) == batch_size
            returned.update(outcome.ordinal for outcome in outcomes)
            producer.advance(step + 1, version=step + 1)
            assert producer.pending == []
        assert returned == Counter(range(rollouts.prompts))
        assert await producer.close() == []

    asyncio.run(run())


def test_the_contract_is_tried_out_before_a_run():
    check_rollout(plain)

    async def too_few(rollout):
        return [await rollout.play()]

    async def raises(rollout):
        raise KeyError("x")

    def synchronous(rollout):
        return []

    for function, sentence in ((too_few, "returns 2 of"), (raises, "KeyError"), (synchronous, "list")):
        with pytest.raises(ValueError, match=sentence):
            check_rollout(function)


async def test_the_contract_may_be_tried_where_an_event_loop_runs():
    check_rollout(plain)
