"""What players do, wherever they run: scenarios, which take a function from a number to a launcher."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from contextlib import asynccontextmanager
from types import MappingProxyType
from unittest import mock

import numpy as np
import pytest

from agentrl import Task
from agentrl.data import Prompt
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.clients import Clients
from agentrl.envs import Scorer
from agentrl.errors import RequestTooLargeError, WorldBrokenError
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players import direct
from agentrl.rollout.players import players as players_module
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.players import Players
from agentrl.runtime.activity import Activities
from agentrl.runtime.clocks import clocks_stopped
from agentrl.types import Completion, Ending, Finish
from tests.engine.serving import embedded_server
from tests.engine.subjects import VOCAB
from tests.rollout.playing_process import World
from tests.trainer.megatron.launching import alive

SILENT_S = 3.0


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


def players_in(tmp_path, engine, launcher, *, size=2, episodes=None, url="", clients=None, file=""):
    plan = PlayerPlan("tests.rollout.playing_process", json.dumps([size, url, file]).encode(), tmp_path)
    lines = []
    players = Players(launcher, plan, engine, Activities(), lines.append, clients)
    driver = GroupPlayer(World, lambda: None, Scorer(), size, 0, 0, episodes=episodes)
    return players.in_place_of(driver), lines


async def pids_of(players):
    """The processes that play."""
    return [await player.pid() for player in players.processes]


def prompt(index, text="go"):
    return Prompt(index, Task.ask(f"t{index}", text), index)


async def in_flight(players, engine, of):
    """A group whose two episodes have sent their requests."""
    playing = asyncio.create_task(players.play(of, version=0))
    while len(engine.sessions) < 2:
        await asyncio.sleep(0.01)
    return playing


async def groups_are_played_by_all_players_with_the_engine_of_the_driver(tmp_path, launched):
    engine = Engine()
    players, lines = players_in(tmp_path, engine, launched(2))
    async with players:
        outcomes = await asyncio.gather(*(players.play(prompt(index), version=3) for index in range(4)))
        pids = await pids_of(players)
        assert len(set(pids)) == 2
    assert [outcome.group.id for outcome in outcomes] == ["g0", "g1", "g2", "g3"]
    assert {outcome.group.start_version for outcome in outcomes} == {3}
    assert sorted(engine.closed) == sorted(engine.sessions)
    assert len(engine.sessions) == 8
    assert not lines
    # One that was not open yet ends some seconds after its actor.
    async with asyncio.timeout(10.0):
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            await asyncio.sleep(0.05)


async def an_error_of_the_engine_fails_the_turn_in_the_player(tmp_path, launched):
    engine = Engine()
    engine.error = RequestTooLargeError("too long")
    players, _ = players_in(tmp_path, engine, launched(1))
    async with players:
        outcome = await players.play(prompt(0), version=0)
    assert outcome.group is None
    assert all("RequestTooLargeError: too long" in episode.failure.detail for episode in outcome.failed)


async def a_cancelled_group_cancels_its_requests_and_keeps_what_was_played(tmp_path, launched):
    engine = Engine()
    engine.is_held.clear()
    players, _ = players_in(tmp_path, engine, launched(1))
    async with players:
        playing = await in_flight(players, engine, prompt(0))
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert sorted(engine.cancelled) == sorted(engine.sessions)
        outcome = players.cancelled(prompt(0))
    assert [episode.ending for episode in outcome.finished] == [Ending.ABORTED] * 2


async def a_wait_for_a_slot_of_the_engine_stops_the_clocks_in_the_player(tmp_path, launched):
    engine = Engine()
    engine.is_held.clear()
    players, _ = players_in(tmp_path, engine, launched(1))
    async with players:
        playing = await in_flight(players, engine, prompt(0))
        await asyncio.sleep(2 * World.limits.episode_timeout_s)
        engine.is_held.set()
        outcome = await playing
    assert not outcome.failed
    assert outcome.group is not None


async def a_player_that_is_not_open_holds_no_group(tmp_path, launched):
    """Neither those that came before the others were open, nor later ones."""
    engine = Engine()
    players, lines = players_in(tmp_path, engine, launched(2), file=str(tmp_path / "first"))
    async with players:
        async with asyncio.timeout(60.0):
            outcomes = await asyncio.gather(*(players.play(prompt(index), version=3) for index in range(6)))
            outcomes += [await players.play(prompt(index), version=3) for index in range(6, 9)]
        assert sum(member.is_open for member in players._pool.members) == 1
    assert [outcome.group.id for outcome in outcomes] == [f"g{index}" for index in range(9)]
    assert not lines


async def what_cannot_be_sent_or_read_ends_the_run_with_a_sentence(tmp_path, launched):
    values = {
        "a task or an episode of g0 cannot be sent between the run and a player": MappingProxyType({}),
        "what the run and a player send each other cannot be read": Foreign(),
    }
    for number, (sentence, value) in enumerate(values.items()):
        folder = tmp_path / str(number)
        players, _ = players_in(folder, Engine(), launched(1))
        async with players, asyncio.timeout(60.0):
            of = prompt(0)
            task = dataclasses.replace(of.task, metadata={"value": value})
            with pytest.raises(WorldBrokenError, match=sentence):
                await players.play(dataclasses.replace(of, task=task), version=0)


class Foreign:
    """Pickle takes it, and no other process has its class."""

    def __reduce__(self):
        return getattr, ("", "no_such_class")


@asynccontextmanager
async def players_at_a_server(tmp_path, launcher):
    """Players that send their requests to a server themselves, and the clients that are held."""
    async with embedded_server() as (url, _):
        policy, engine = SGLangPolicy(url, vocab_size=VOCAB), Engine()
        clients = Clients(policy)
        players, lines = players_in(tmp_path, engine, launcher, url=url, clients=clients)
        async with players:
            yield players, clients, lines
        await policy.close()
        assert not engine.sessions, "no request goes through the driver"


async def requests_of_players_go_to_the_servers_unless_the_driver_holds_them(tmp_path, launched):
    async with players_at_a_server(tmp_path, launched(2)) as (players, clients, lines):
        # Once they have their environments: a hold then waits for their answers.
        await asyncio.gather(*(players.play(prompt(index), version=0) for index in range(2)))
        async with clients.held():
            playing = [asyncio.create_task(players.play(prompt(index), version=0)) for index in range(2, 6)]
            # Longer than an episode may take: a hold stops its clocks.
            await asyncio.sleep(2 * World.limits.episode_timeout_s)
            assert not any(task.done() for task in playing)
        outcomes = await asyncio.gather(*playing)
        assert [outcome.group.id for outcome in outcomes] == ["g2", "g3", "g4", "g5"]
        assert not any(outcome.failed for outcome in outcomes)
    assert not lines


async def a_player_that_hangs_while_requests_are_held_is_replaced(tmp_path, launched):
    async with players_at_a_server(tmp_path, launched(1)) as (players, clients, lines):
        await players.play(prompt(0), version=0)
        (pid,) = await pids_of(players)
        os.kill(pid, signal.SIGSTOP)
        playing = asyncio.create_task(players.play(prompt(1), version=0))
        with mock.patch.object(direct, "HOLD_S", 1.0):
            async with clients.held():
                assert not playing.done()
        assert (await playing).group.id == "g1"
        assert (await pids_of(players)) != [pid]
    (line,) = lines
    assert "groups g1 are played again" in line


async def the_groups_of_a_killed_player_are_played_again(tmp_path, launched):
    engine = Engine()
    engine.is_held.clear()
    players, lines = players_in(tmp_path, engine, launched(1))
    async with players:
        playing = await in_flight(players, engine, prompt(7))
        os.kill((await pids_of(players))[0], signal.SIGKILL)
        while len(engine.sessions) < 4:
            await asyncio.sleep(0.01)
        assert sorted(engine.cancelled) == sorted(set(engine.sessions))
        assert set(engine.closed) == set(engine.sessions)
        engine.is_held.set()
        outcome = await playing
    assert outcome.group.id == "g7"
    (line,) = lines
    assert "was ended by SIGKILL; groups g7 are played again" in line


async def the_groups_of_a_player_that_hangs_are_played_again(tmp_path, launched):
    """A pause of the driver's own is none of the player's."""
    engine = Engine()
    engine.is_held.clear()
    players, lines = players_in(tmp_path, engine, launched(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(players_module, "SILENT_S", SILENT_S)
        async with players:
            playing = await in_flight(players, engine, prompt(7))
            time.sleep(2 * SILENT_S)
            await asyncio.sleep(SILENT_S / 2)
            assert not lines
            (hanging,) = await pids_of(players)
            os.kill(hanging, signal.SIGSTOP)
            while len(engine.sessions) < 4:
                await asyncio.sleep(0.01)
            assert not alive(hanging)
            engine.is_held.set()
            outcome = await playing
    assert outcome.group.id == "g7"
    (line,) = lines
    assert f"has sent nothing for {SILENT_S:g} s, and was ended; groups g7 are played again" in line


async def a_group_that_ends_its_players_ends_the_run_with_a_sentence(tmp_path, launched):
    players, lines = players_in(tmp_path, Engine(), launched(1))
    async with players:
        with pytest.raises(WorldBrokenError) as caught:
            await players.play(prompt(0, "die"), version=0)
    assert len(lines) == 2
    assert all(part in str(caught.value) for part in ("ended with code 3", "g0", "the last words", "mend"))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        groups_are_played_by_all_players_with_the_engine_of_the_driver,
        an_error_of_the_engine_fails_the_turn_in_the_player,
        a_cancelled_group_cancels_its_requests_and_keeps_what_was_played,
        a_wait_for_a_slot_of_the_engine_stops_the_clocks_in_the_player,
        requests_of_players_go_to_the_servers_unless_the_driver_holds_them,
        a_player_that_is_not_open_holds_no_group,
        what_cannot_be_sent_or_read_ends_the_run_with_a_sentence,
    )
}
FAULTS = {
    scenario.__name__: scenario
    for scenario in (
        the_groups_of_a_player_that_hangs_are_played_again,
        the_groups_of_a_killed_player_are_played_again,
        a_group_that_ends_its_players_ends_the_run_with_a_sentence,
        a_player_that_hangs_while_requests_are_held_is_replaced,
    )
}
