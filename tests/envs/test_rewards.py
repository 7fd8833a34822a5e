"""Verdicts of episodes: parts by name, weighted, and a failed reward is no zero."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import GroupReward, Limits, Reward, Task, UserError
from agentrl.envs import Scorer, score
from agentrl.envs.scoring import Marked
from agentrl.errors import StageError
from agentrl.records import Entry, Journal, Outcome, read_journal
from agentrl.tools import inline
from agentrl.types import Ending, Episode, Failure, RewardParts, Verdict
from tests.worlds import FOREVER_S

TASK = Task.ask("t", "?")
MOST_CALLS = 80
"""Of functions, to mark and judge an episode: 59 where they were counted."""
NUMBERS = st.floats(-1e6, 1e6)


def episode(id="e", rewards=(), ending=Ending.COMPLETED, *, task=TASK, seed=0, limits=None):
    failure = Failure("tool", "error", "down") if ending is Ending.FAILED else None
    return Episode(id, "X-v0", task, seed, limits or Limits(), (), tuple(rewards), ending, failure)


def constant(value, name):
    @inline
    def reward(_):
        return value

    return Reward(reward, name=name)


async def verdict_of(played, *rewards):
    marked = await Scorer(rewards).mark(played)
    assert marked.episode is played
    return (await Scorer(rewards).judge([marked]))[0]


@given(
    st.lists(st.none() | NUMBERS, max_size=4),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(NUMBERS, st.floats(-9, 9))),
)
async def test_the_total_is_the_steps_and_the_weighted_parts(steps, parts):
    rewards = [replace(constant(value, name), weight=weight) for name, (value, weight) in parts.items()]
    verdict = await verdict_of(episode(rewards=steps), *rewards)
    own = math.fsum(reward or 0.0 for reward in steps)
    expected = math.fsum([own, *(value * weight for value, weight in parts.values())])
    assert verdict.total == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert verdict.parts == {"env": pytest.approx(own, abs=1e-6), **{k: v for k, (v, _) in parts.items()}}
    assert (verdict.episode_id, verdict.scorer, verdict.turn_rewards) == ("e", "env", tuple(steps))


async def test_a_reward_of_weight_zero_is_only_measured():
    verdict = await verdict_of(episode(rewards=[1.0]), replace(constant(7.0, "length"), weight=0.0))
    assert verdict.total == 1.0
    assert verdict.parts["length"] == 7.0


async def test_parts_of_step_rewards_are_kept_by_name_and_summed_over_steps():
    steps = [RewardParts({"right": 1.0, "style": 0.5}), None, 2.0, RewardParts({"style": 0.25})]
    verdict = await verdict_of(episode(rewards=steps))
    assert verdict.total == 3.75
    assert verdict.parts == {"env": 3.75, "env/right": 1.0, "env/style": 0.75}


@pytest.mark.parametrize("number", [1, True, np.float32(1), np.int64(1)])
async def test_a_part_may_be_any_real_number_and_becomes_a_float(number):
    part = (await verdict_of(episode(), constant(number, "x"))).parts["x"]
    assert part == 1.0
    assert type(part) is float


async def test_a_reward_may_be_async_and_a_callable_object():
    class Judge:
        async def __call__(self, played):
            await asyncio.sleep(0)
            return float(played.id == "e")

    assert (await verdict_of(episode(), Reward(Judge()))).parts == {"env": 0.0, "Judge": 1.0}


def raises(_):
    raise ConnectionError("judge offline")


@pytest.mark.parametrize(
    ("function", "kind", "sentence"),
    [
        (raises, "error", "`x` failed: ConnectionError: judge offline"),
        (lambda _: math.nan, "invalid", "`x` is nan, return a finite number"),
        (lambda _: -math.inf, "invalid", "`x` is -inf"),
        (lambda _: 10**400, "invalid", "`x` is 1000000"),
        (lambda _: None, "invalid", "`x` is None"),
        (lambda _: "1", "invalid", "`x` is '1'"),
    ],
)
async def test_a_reward_that_breaks_fails_its_episode(function, kind, sentence):
    played = episode(rewards=[1.0])
    marked = await Scorer([Reward(function, name="x")]).mark(played)
    assert not marked.is_usable
    assert marked.episode.ending is Ending.FAILED
    assert (marked.episode.failure.stage, marked.episode.failure.kind) == ("reward", kind)
    assert sentence in marked.episode.failure.detail
    assert played.failure is None


async def test_a_total_beyond_all_numbers_is_refused():
    marked = await Scorer([constant(1e308, "x")]).mark(episode(rewards=[1e308]))
    with pytest.raises(StageError, match="the total is inf"):
        await Scorer([constant(1e308, "x")]).judge([marked])


async def test_a_reward_that_blocks_stops_neither_the_loop_nor_its_deadline():
    release = threading.Event()
    ticks = []

    def block(_):
        release.wait(FOREVER_S)
        return 1.0

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    began = time.perf_counter()
    limits = Limits(reward_timeout_s=0.5)
    marked = await Scorer([Reward(block)]).mark(episode(limits=limits))
    assert time.perf_counter() - began < FOREVER_S / 2
    assert len(ticks) > 3
    assert marked.episode.failure == Failure("reward", "timeout", "`block` failed: took longer than 0.5 s")
    ticking.cancel()
    release.set()


@pytest.mark.parametrize("quick", [True, False])
async def test_only_inline_rewards_run_on_the_event_loop(quick):
    def where(_):
        return float(threading.current_thread() is threading.main_thread())

    reward = Reward(inline(where) if quick else where)
    assert (await verdict_of(episode(), reward)).parts["where"] == quick


async def test_an_episode_cut_short_is_measured_and_one_that_failed_is_not():
    measured = []

    @inline
    def look(played):
        measured.append(played.ending)
        return 1.0

    scorer = Scorer([Reward(look)])
    for ending in Ending:
        await scorer.mark(episode(ending=ending))
    assert measured == [Ending.COMPLETED, Ending.TRUNCATED]


async def test_siblings_are_compared_together_and_each_gets_its_own():
    compared = []

    @inline
    def rank(siblings):
        compared.append([sibling.id for sibling in siblings])
        order = sorted(sibling.step_rewards[0] for sibling in siblings)
        return [order.index(sibling.step_rewards[0]) for sibling in siblings]

    scorer = Scorer([GroupReward(rank, weight=0.5), constant(1.0, "one")])
    marked = [await scorer.mark(episode(f"e{n}", [reward])) for n, reward in enumerate([3.0, 1.0, 2.0])]
    verdicts = await scorer.judge(marked)
    assert compared == [["e0", "e1", "e2"]]
    assert [v.parts["rank"] for v in verdicts] == [2.0, 0.0, 1.0]
    assert [v.total for v in verdicts] == [3 + 1 + 1, 1 + 1 + 0, 2 + 1 + 0.5]


@pytest.mark.parametrize("quick", [True, False])
async def test_a_group_reward_may_return_an_array_and_cannot_reorder_the_group(quick):
    def spoil(siblings):
        with pytest.raises(AttributeError):
            siblings.reverse()
        return np.arange(len(siblings), dtype=np.float32)

    scorer = Scorer([GroupReward(inline(spoil) if quick else spoil)])
    verdicts = await scorer.judge([Marked(episode(f"e{n}"), {}) for n in range(3)])
    assert [v.total for v in verdicts] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0], "return one number for each of 2 siblings"),
        (1.0, "return one number for each of 2 siblings"),
        ([1.0, math.nan], "`all` is nan"),
    ],
)
async def test_a_group_reward_that_breaks_breaks_for_all(returned, sentence):
    scorer = Scorer([GroupReward(lambda _: returned, name="all")])
    siblings = [Marked(episode(f"e{n}"), {}) for n in range(2)]
    with pytest.raises(StageError, match=sentence) as caught:
        await scorer.judge(siblings)
    assert (caught.value.stage, caught.value.kind) == ("reward", "invalid")
    scored = await scorer.judge_all(siblings)
    assert [e.failure.stage for e in scored.episodes] == ["reward", "reward"]
    assert scored.verdicts == ()


async def test_siblings_are_those_of_one_task_in_one_world():
    other = Task.ask("u", "?")
    several = [
        episode("a", seed=1),
        episode("b", seed=2),
        episode("c", seed=1),
        episode("d", seed=1, task=other),
        episode("e", ending=Ending.FAILED, seed=1),
    ]

    @inline
    def size(siblings):
        return [len(siblings)] * len(siblings)

    scored = await score(several, [GroupReward(size)])
    assert {v.episode_id: v.total for v in scored.verdicts} == {"a": 2, "b": 1, "c": 2, "d": 1}
    assert [v.episode_id for v in scored.verdicts] == ["a", "b", "c", "d"]
    assert scored.episodes[4] is several[4]


async def test_scoring_again_changes_no_episode_and_no_verdict(tmp_path):
    several = [episode(f"e{n}", [RewardParts({"right": float(n)})]) for n in range(3)]
    first = await score(several, [])
    entries = [
        Entry(scored, (verdict,), Outcome.TRAINED)
        for scored, verdict in zip(several, first.verdicts, strict=True)
    ]
    async with Journal(tmp_path) as journal:
        path = await journal.write_step(1, entries)
    before = path.read_bytes()

    def fails_for_e1(played):
        return 1 / (played.id != "e1")

    read = list(read_journal(path))
    scored = await score([e.episode for e in read], [Reward(fails_for_e1, 10.0)], name="again")
    assert path.read_bytes() == before
    assert [e.verdict for e in read] == list(first.verdicts)
    assert read[2].verdict.parts == {"env": 2.0, "env/right": 2.0}
    parts = {"env": 2.0, "env/right": 2.0, "fails_for_e1": 1.0}
    assert scored.verdicts[1] == Verdict("e2", "again", 12.0, parts, (2.0,))
    assert [e.ending.value for e in scored.episodes] == ["completed", "failed", "completed"]
    assert read[1].episode.ending is Ending.COMPLETED


def one(_):
    return 1.0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Reward(lambda _: 1.0), "a Reward cannot be called `<lambda>`; give it a `name=`"),
        (lambda: Reward(one, name="env"), "a Reward cannot be called `env`"),
        (lambda: GroupReward(one, name="a/b"), "a GroupReward cannot be called `a/b`"),
        (lambda: Reward(3), "Reward takes a function, got 3"),
        (lambda: Reward(one, math.inf), "Reward `one` has the weight inf; give it a finite one"),
        (lambda: Scorer((one,)), r"wrap it in Reward\(...\) or GroupReward\(...\)"),
        (lambda: Scorer(Reward(one)), r"write a tuple, `rewards = \(Reward\(...\),\)`"),
        (lambda: Scorer((Reward(one), GroupReward(one))), "two rewards are called `one`"),
    ],
)
def test_rewards_that_make_no_sense_are_refused_with_the_next_move(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


async def test_without_rewards_scoring_takes_few_calls():
    """Of functions, in Python and in C: what it costs, without a clock."""
    scorer, several = Scorer(), [episode(f"e{n}", [None, 1.0]) for n in range(8)]
    await scorer.judge([await scorer.mark(played) for played in several])
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        await scorer.judge([await scorer.mark(played) for played in several])
    finally:
        sys.setprofile(None)
    assert 0 < (calls["call"] + calls["c_call"]) / len(several) < MOST_CALLS
