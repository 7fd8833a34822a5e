"""Players: no group is lost, whatever ends; requests, clocks and errors are those of the driver's engine."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task
from agentrl.activity import Activities
from agentrl.clocks import clocks_stopped
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.errors import EnvCodeError, RequestTooLargeError, StageError, TokenLawError, WorldBrokenError
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.dispatch import Dispatch
from agentrl.rollout.players.players import PlayerPlan, Players
from agentrl.types import Completion, Ending, Finish
from tests.rollout.playing_process import World


class Engine:
    """Answers at once, or waits with stopped clocks; refuses where `error` is set."""

    version = 0

    def __init__(self):
        self.error, self.is_held = None, asyncio.Event()
        self.sessions, self.closed, self.cancelled = [], [], []
        self.is_held.set()

    async def generate(self, prompt_ids, sampling, *, session):
        self.sessions.append(session)
        if self.error is not None:
            raise self.error
        try:
            with clocks_stopped():
                await self.is_held.wait()
        except asyncio.CancelledError:
            self.cancelled.append(session)
            raise
        ids = np.arange(2, dtype=np.int32)
        return Completion(ids, np.zeros(2, np.float32), np.zeros(2, np.int32), Finish.STOP, 1)

    async def close_session(self, session):
        self.closed.append(session)


def players_in(tmp_path, engine, number=1, size=2):
    plan = PlayerPlan("tests.rollout.playing_process", str(size).encode(), tmp_path)
    lines = []
    players = Players(number, plan, engine, Activities(), lines.append)
    driver = GroupPlayer(World, lambda: None, Scorer(), size, 0, 0)
    return players.in_place_of(driver), lines


def prompt(index, text="go"):
    return Prompt(index, Task.ask(f"t{index}", text), index)


@given(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=60))
def test_a_group_is_at_the_least_loaded_player_until_it_ends(size, events):
    dispatch, at, ordinal = Dispatch(size), {}, 0
    for event in events:
        loads = [len(dispatch.of(player)) for player in range(size)]
        if event < 5 or not at:
            player = at[ordinal] = dispatch.start(ordinal)
            assert loads[player] == min(loads)
            ordinal += 1
        elif event < 8:
            ended = sorted(at)[event % len(at)]
            dispatch.end(ended)
            del at[ended]
        else:
            dispatch.lost(event % size, was_open=True)
        assert {o: p for p in range(size) for o in dispatch.of(p)} == at


@pytest.mark.parametrize(
    "error",
    [
        StageError("tool", "timeout", "late"),
        EnvCodeError("tasks", "error", "X"),
        TokenLawError("bad", "once"),
    ],
)
def test_an_error_keeps_its_type_and_attributes_across_a_pipe(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


async def test_groups_are_played_by_all_players_with_the_engine_of_the_driver(tmp_path):
    engine = Engine()
    players, lines = players_in(tmp_path, engine, number=2)
    async with players:
        outcomes = await asyncio.gather(*(players.play(prompt(index), version=3) for index in range(4)))
    assert [outcome.group.id for outcome in outcomes] == ["g0", "g1", "g2", "g3"]
    assert {outcome.group.start_version for outcome in outcomes} == {3}
    assert sorted(engine.closed) == sorted(engine.sessions)
    assert len(engine.sessions) == 8
    assert not lines
    assert all(not os.path.exists(f"/proc/{pid}") for pid in players.pids)


async def test_an_error_of_the_engine_fails_the_turn_in_the_player(tmp_path):
    engine = Engine()
    engine.error = RequestTooLargeError("too long")
    players, _ = players_in(tmp_path, engine)
    async with players:
        outcome = await players.play(prompt(0), version=0)
    assert outcome.group is None
    assert all("RequestTooLargeError: too long" in episode.failure.detail for episode in outcome.failed)


async def test_a_cancelled_group_cancels_its_requests_and_keeps_what_was_played(tmp_path):
    engine = Engine()
    engine.is_held.clear()
    players, _ = players_in(tmp_path, engine)
    async with players:
        playing = asyncio.create_task(players.play(prompt(0), version=0))
        while len(engine.sessions) < 2:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert sorted(engine.cancelled) == sorted(engine.sessions)
        outcome = players.cancelled(prompt(0))
    assert [episode.ending for episode in outcome.finished] == [Ending.ABORTED] * 2


async def test_a_wait_for_a_slot_of_the_engine_stops_the_clocks_in_the_player(tmp_path):
    engine = Engine()
    engine.is_held.clear()
    players, _ = players_in(tmp_path, engine)
    async with players:
        playing = asyncio.create_task(players.play(prompt(0), version=0))
        while len(engine.sessions) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * World.limits.episode_timeout_s)
        engine.is_held.set()
        outcome = await playing
    assert not outcome.failed
    assert outcome.group is not None


@pytest.mark.faults
async def test_the_groups_of_a_killed_player_are_played_again(tmp_path):
    engine = Engine()
    engine.is_held.clear()
    players, lines = players_in(tmp_path, engine)
    async with players:
        playing = asyncio.create_task(players.play(prompt(7), version=0))
        while len(engine.sessions) < 2:
            await asyncio.sleep(0.01)
        os.kill(players.pids[0], signal.SIGKILL)
        while len(engine.sessions) < 4:
            await asyncio.sleep(0.01)
        assert sorted(engine.cancelled) == sorted(set(engine.sessions))
        assert set(engine.closed) == set(engine.sessions)
        engine.is_held.set()
        outcome = await playing
    assert outcome.group.id == "g7"
    (line,) = lines
    assert "was ended by SIGKILL; groups g7 are played again" in line


@pytest.mark.faults
async def test_a_group_that_ends_its_players_ends_the_run_with_a_sentence(tmp_path):
    players, lines = players_in(tmp_path, Engine())
    async with players:
        with pytest.raises(WorldBrokenError) as caught:
            await players.play(prompt(0, "die"), version=0)
    assert len(lines) == 2
    assert all(part in str(caught.value) for part in ("ended with code 3", "g0", "the last words", "mend"))
