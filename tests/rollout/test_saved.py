"""Groups that a run stops go on when it resumes: token for token those of a run that was not stopped."""

from __future__ import annotations

import asyncio
import math
import random

import numpy as np
import pytest

from agentrl.algorithms.filters import ZERO_STD
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.envs.resuming import PLAYED_AGAIN, StoppableEpisodes
from agentrl.rollout import producer as producing
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import EarlyEnd, Producer, ProducerSettings
from agentrl.rollout.saved import SavedGroups, read_lines
from agentrl.rollout.staleness import GroupPlaces, Window
from tests.envs.test_resuming import TASK, Forgetting, Letters, Rare, engine_of, logprobs_of, record_of
from tests.worlds import FOREVER_S

SETTINGS = SamplingSettings(max_response_len=60)
GROUPS, SIZE = 3, 2


class Counted(Letters):
    """Counts the steps of all its instances."""

    num_steps = 0

    async def step(self, action):
        Counted.num_steps += 1
        return await super().step(action)


class Playing:
    """Groups of `env_class`, in flight one version ahead; a group ends at odd ordinals as one to drop."""

    def __init__(self, env_class=Counted, *, timeout_s=math.inf, saved=None, note=None):
        self.started, self.episodes = [], StoppableEpisodes()
        self.player = GroupPlayer(
            env_class,
            self.agent,
            Scorer(),
            SIZE,
            retries=1,
            seed=0,
            drops=lambda group: ZERO_STD if group.id == "g1" else None,
            timeout_s=timeout_s,
            episodes=self.episodes,
            note=note,
        )
        early = EarlyEnd(self.player.cancelled, stop=self.episodes.stop)
        policy = Window(GroupPlaces(1, GROUPS - 1), GROUPS)
        self.producer = Producer(self.prompt, self.player.play, ProducerSettings(GROUPS - 1), policy, early)
        self.producer.resume(version=0, saved=saved)

    @staticmethod
    def agent():
        return TokenAgent(engine_of(), Rare(), SETTINGS)

    def prompt(self):
        self.started.append(len(self.started))
        return Prompt(self.started[-1], TASK, 3 + self.started[-1])

    async def batch(self):
        """The first batch, without what was started for the next one."""
        outcomes = await self.producer.take()
        await self.producer.close()
        return outcomes


def records_of(outcomes):
    return {episode.id: record_of(episode) for outcome in outcomes for episode in outcome.episodes}


@pytest.mark.parametrize("timeout_s", [math.inf, 3600.0], ids=["no deadline", "deadline"])
async def test_a_batch_with_stops_at_random_places_is_the_one_without(tmp_path, timeout_s):
    Counted.num_steps = 0
    expected = await Playing().batch()
    num_steps, Counted.num_steps = Counted.num_steps, 0
    assert [outcome.reason for outcome in expected] == ["", ZERO_STD, ""]
    rng, path, stops, ended, went_on = random.Random(1), tmp_path / "groups.jsonl", 0, 0, 0
    for _ in range(60):
        _, saved = read_lines(path, version=0, on_event=pytest.fail)
        playing = Playing(timeout_s=timeout_s, saved=saved)
        taking = asyncio.create_task(playing.batch())
        for _ in range(rng.randrange(15, 60)):
            await asyncio.sleep(0)
        if taking.done():
            break
        stopped = await playing.producer.stop()
        taking.cancel()
        await asyncio.wait([taking])
        saved = SavedGroups.of(await playing.producer.close(), stopped)
        # Nothing was cancelled: each group that was started is saved.
        assert {*saved.ended, *saved.in_progress} == set(playing.started)
        stops, ended, went_on = stops + 1, ended + len(saved.ended), went_on + len(saved.in_progress)
        saved.write(path)
    assert taking.done(), "it begins again each time"
    outcomes = taking.result()
    # Nothing was played twice; some steps are of groups of the batch after, which play meanwhile.
    assert Counted.num_steps - num_steps <= GROUPS * SIZE
    assert min(stops, ended, went_on) > 2
    assert [(outcome.group.id, outcome.reason) for outcome in outcomes] == [
        (outcome.group.id, outcome.reason) for outcome in expected
    ]
    assert records_of(outcomes) == records_of(expected)
    for one, other in zip(outcomes, expected, strict=True):
        for episode, without_stops in zip(one.episodes, other.episodes, strict=True):
            assert np.allclose(logprobs_of(episode), logprobs_of(without_stops), rtol=0, atol=1e-4)
        assert [v.total for v in one.group.verdicts] == [v.total for v in other.group.verdicts]


async def stopped_at_once(env_class):
    """The groups that were started, stopped when all of their episodes have begun."""
    playing = Playing(env_class)
    taking = asyncio.create_task(playing.batch())
    for _ in range(40):
        await asyncio.sleep(0)
    stopped = await playing.producer.stop()
    taking.cancel()
    await asyncio.wait([taking])
    await playing.producer.close()
    return SavedGroups.of((), stopped)


async def test_episodes_of_a_world_that_saves_no_state_begin_again_and_are_counted():
    saved = await stopped_at_once(Forgetting)
    num_saved = sum(each is not None for group in saved.in_progress.values() for each in group.stopped)
    assert num_saved > 0
    outcomes = await Playing(Forgetting, saved=saved).batch()
    counts = [episode.counts.get(PLAYED_AGAIN, 0) for outcome in outcomes for episode in outcome.episodes]
    assert set(counts) <= {0, 1}
    assert 0 < sum(counts) <= num_saved
    assert records_of(outcomes).keys() == records_of(await Playing(Forgetting).batch()).keys()


async def test_a_group_starts_at_the_version_at_which_it_started():
    saved = await stopped_at_once(Letters)
    assert {group.start_version for group in saved.in_progress.values()} == {0}
    playing = Playing()
    playing.producer.resume(version=7, saved=saved)
    kept = [outcome.group for outcome in await playing.batch() if outcome.kept is not None]
    assert {group.start_version for group in kept} == {0}
    assert {group.end_version for group in kept} == {7}


class Stuck(Letters):
    """A tool call that takes longer than anybody waits."""

    async def step(self, action):
        await asyncio.sleep(FOREVER_S)


async def test_a_group_that_does_not_stop_in_time_is_left_to_close(monkeypatch):
    monkeypatch.setattr(producing, "_STOP_S", 0.05)
    playing = Playing(Stuck)
    taking = asyncio.create_task(playing.batch())
    await asyncio.sleep(1.0)
    assert await playing.producer.stop() == {}
    taking.cancel()
    assert await playing.producer.close() == []
    assert len(asyncio.all_tasks()) <= 2


async def test_a_damaged_file_is_a_sentence(tmp_path):
    path, events = tmp_path / "groups.jsonl", []

    def read():
        return read_lines(path, version=0, on_event=events.append)[1]

    saved = await stopped_at_once(Letters)
    assert read().in_progress == {}
    saved.write(path)
    assert read().in_progress.keys() == saved.in_progress.keys()
    assert events == []
    data = path.read_bytes()
    for number, damaged in enumerate((b"{}\n", b"[" * 100_000 + b"\n", data[:40] + bytes(40) + b"\n"), 1):
        path.write_bytes(damaged)
        assert read().in_progress == {}
        assert len(events) == number
        assert events[-1] == f"Warning: {path} is damaged: what was in flight is played again."
    # The process ended while it wrote the last line.
    path.write_bytes(data[:-10])
    assert len(read().in_progress) == len(saved.in_progress) - 1
    assert len(events) == number
    SavedGroups().write(path)
    assert not path.exists()
