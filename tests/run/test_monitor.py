"""What a run reports of its state: who is to blame for a hang, who waits for whom, who works how much."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl import Reward, call, say
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.records.status import STATUS, read_status
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import Producer, ProducerSettings
from agentrl.rollout.staleness import GroupPlaces, Window
from agentrl.run.loop import PlayLoop
from agentrl.run.monitor import Monitor, utilisation_metrics
from agentrl.runtime.activity import TAKE, TRAIN, Activities, Busy, requesting, working
from agentrl.view.console import StageBar
from tests.worlds import ASK, Parrot, Speaker

HANG_S = 0.2


class Hangs:
    """Groups of two; the first episode of the second group waits in one stage until it is released."""

    def __init__(self, stage: str) -> None:
        self.stage, self.released = stage, asyncio.Event()
        self.since = 0.0
        self.num_envs = self.num_prompts = 0
        hangs = self

        class World(Parrot):
            def __init__(self):
                super().__init__()
                self.number = hangs.num_envs
                hangs.num_envs += 1

            async def reset(self, task, *, seed):
                await hangs.waits("reset", self.number)
                return await super().reset(task, seed=seed)

            async def echo(self, text: str) -> str:
                """Say it again."""
                await hangs.waits("tool", self.number)
                return text

            async def step(self, action):
                await hangs.waits("step", self.number)
                return await super().step(action)

            tools = (echo,)

        async def graded(episode):
            await hangs.waits("reward", 2 if episode.id == "g1-0" else 0)
            return 1.0

        self.player = GroupPlayer(World, self.agent, Scorer((Reward(graded),)), 2, 0, 0)

    async def waits(self, stage: str, number: int) -> None:
        # Two groups of two: the environments are made in the order of the groups.
        if stage == self.stage and number == 2:
            self.since = time.time()
            await self.released.wait()

    def agent(self):
        hangs, number = self, self.num_envs - 1

        class Agent(Speaker):
            async def act(self, observation, **options):
                await hangs.waits("act", number)
                return await super().act(observation, **options)

        return Agent(call("echo", text="x"), say("3"))

    def prompt(self) -> Prompt:
        self.num_prompts += 1
        return Prompt(self.num_prompts - 1, ASK, 0)

    def producer(self, *, max_staleness: int = 0) -> Producer:
        policy = Window(GroupPlaces(max_staleness, 2))
        return Producer(self.prompt, self.player.play, ProducerSettings(2, num_batches=1), policy)


@asynccontextmanager
async def monitored(folder: Path, **options):
    """A monitor of a run, and the list of its warnings."""
    warnings: list[str] = []
    async with Monitor(Activities(), folder, warnings.append, **options) as monitor:
        yield monitor, warnings


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("reset", "in reset() of the environment"),
        ("step", "in step() of the environment"),
        ("tool", "in the tool echo"),
        ("act", "waiting for the engine"),
        ("reward", "in the reward graded"),
    ],
)
async def test_a_hang_is_blamed_on_the_oldest_group_its_episode_and_its_stage(tmp_path, stage, words):
    hangs = Hangs(stage)
    producer = hangs.producer()
    async with monitored(tmp_path, hang_warning_s=HANG_S) as (monitor, warnings):
        with monitor.iterations(PlayLoop(producer), StageBar("RL", 4, lambda bar: None)), working(TAKE):
            began = time.time()
            taking = asyncio.create_task(producer.take())
            # On a slow machine the start is a hang, too.
            await until(lambda: any("oldest group" in warning for warning in warnings))
            blame, status = warnings[-1], read_status(tmp_path)
            hangs.released.set()
            outcomes = await taking
            await until(lambda: warnings[-1] != blame)
    assert [outcome.group.id for outcome in outcomes] == ["g0", "g1"]
    since = r"since \d\d:\d\d:\d\d \(\d s\)"
    assert blame.startswith("Warning: no progress for 0 s; ")
    where = rf"its episode g1-0 is {re.escape(words)} {since}"
    assert re.search(rf"the oldest group is g1, {since}; {where}", blame)
    assert "trainer waits for groups (1 are complete)" in blame
    assert warnings[-1].startswith("The run goes on, after ")
    assert (status.oldest.group.name, status.oldest.episode.name) == ("g1", "g1-0")
    assert status.oldest.stage.name == stage
    assert began - 1 <= status.oldest.stage.since.timestamp() <= hangs.since + 1
    assert status.idle_s >= HANG_S / 2


async def test_a_run_that_makes_progress_gets_no_warning_and_without_a_limit_none_does(tmp_path):
    async with monitored(tmp_path, hang_warning_s=3 * HANG_S) as (_, warnings):
        for _ in range(16):
            with working(TRAIN):
                await asyncio.sleep(HANG_S / 4)
    assert warnings == []
    async with monitored(tmp_path, period_s=0.02) as (_, warnings):
        await asyncio.sleep(HANG_S)
    assert warnings == []


async def test_a_warning_is_repeated_only_when_twice_the_time_has_passed(tmp_path):
    async with monitored(tmp_path, hang_warning_s=0.1) as (_, warnings):
        with working(TRAIN, "version 3"):
            await asyncio.sleep(0.75)
    # At .1, .2, .4 s; the next would be at .8 s.
    assert 2 <= len(warnings) <= 3
    assert all("in train (version 3) since" in warning for warning in warnings)


async def test_code_that_holds_the_event_loop_is_named_while_it_does(tmp_path):
    async with monitored(tmp_path, hang_warning_s=HANG_S) as (_, warnings):
        await asyncio.sleep(0.1)
        until_s = time.monotonic() + 20
        while not any("held at" in warning for warning in warnings) and time.monotonic() < until_s:
            time.sleep(0.05)
    held = next(warning for warning in warnings if "held at" in warning)
    assert re.search(r"the event loop is held at test_monitor\.py, line \d+", held)


async def test_a_pause_of_the_process_is_no_hang(tmp_path, monkeypatch):
    class Paused:
        """A clock that jumps by an hour."""

        hours = 0

        @classmethod
        def perf_counter(cls):
            return time.perf_counter() + 3600 * cls.hours

    monkeypatch.setattr("agentrl.run.monitor.time", Paused)
    async with monitored(tmp_path, hang_warning_s=1.0) as (_, warnings):
        await asyncio.sleep(0.3)
        Paused.hours = 1
        await asyncio.sleep(0.3)
    assert warnings == []
    assert read_status(tmp_path).idle_s < 1.0


async def test_the_status_has_the_places_the_versions_and_who_waits_for_whom(tmp_path):
    hangs = Hangs("tool")
    producer = hangs.producer(max_staleness=1)
    bar = StageBar("RL", 4, lambda bar: None, done=3)
    async with monitored(tmp_path, period_s=0.01) as (monitor, _):
        with monitor.iterations(PlayLoop(producer), bar):
            producer.resume(version=5)
            taking = asyncio.create_task(producer.take())
            await until(lambda: producer.occupancy.waiting == 1)
            hanging = monitor.status()
            with requesting():
                requests = monitor.status()
            await until(lambda: bar.notes)
            notes = dict(bar.notes)
            hangs.released.set()
            await taking
    assert (hanging.step, hanging.steps, hanging.served, hanging.training) == (3, 4, 5, 5)
    places = hanging.places
    assert (places.capacity, places.in_flight, places.waiting, places.in_training) == (4, 1, 1, 0)
    assert hanging.episodes == {"tool": 1}
    assert hanging.waits["engine"] == "episodes, which are in tool (1)"
    assert hanging.waits["new groups"] == "nothing any more: the last batch has been started"
    assert (requests.requests, "engine" in requests.waits) == (1, False)
    assert set(notes) == {"engine", "trainer"}
    assert all(note.endswith("% busy") for note in notes.values())
    assert json.loads((tmp_path / STATUS).read_text())["episodes"] == {}


async def test_a_disk_that_takes_no_status_stops_nothing(tmp_path):
    async with monitored(tmp_path / "missing", hang_warning_s=0.05) as (_, warnings):
        await asyncio.sleep(0.2)
    assert warnings


def test_the_metrics_of_utilisation_are_shares_of_the_iteration():
    busy = Busy(time_s=10.0, engine_s=6.0, trainer_s=8.0, both_s=5.0)
    played = {"perf/rollout_wait_time_ratio": pytest.approx(0.4)}
    trained = {"perf/train_wait_time": pytest.approx(2.0), "perf/wait_time_ratio": pytest.approx(0.2)}
    overlap = {"perf/overlap_time_ratio": pytest.approx(0.5)}
    assert utilisation_metrics(busy, plays=True, trains=True) == {**played, **trained, **overlap}
    assert utilisation_metrics(busy, plays=True, trains=False) == played
    assert utilisation_metrics(busy, plays=False, trains=True) == trained
