"""Where the machine of a player is going away, its groups go on at others as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.local import LocalPlayer
from agentrl.rollout.players.players import Players
from agentrl.runtime.activity import Activities
from tests.envs.test_resuming import logprobs_of, record_of
from tests.laws.test_on_policy import model_of
from tests.rollout import noting_process as noting
from tests.rollout.player_scenarios import Engine, in_flight, players_at_a_server, players_in
from tests.rollout.player_scenarios import prompt as short_prompt


class Machines:
    """Starts players as child processes; `leave` says of one that its machine is going away."""

    def __init__(self, size):
        self.size, self.events = size, {}

    def start(self, number, plan, log, events):
        self.events[number] = events
        return LocalPlayer(number, plan, log, events)

    def leave(self, number):
        self.events[number].leaving(60.0)


def engine_of():
    # With several threads, their number at a moment decides the order of a sum.
    torch.set_num_threads(1)
    return EmbeddedEngine.from_model(model_of("qwen3"), max_slots=8, deterministic=True)


def records_of(outcomes):
    """All that was sampled, with its logprobs, by episode."""
    return {
        episode.id: (record_of(episode), logprobs_of(episode).tolist())
        for outcome in outcomes
        for episode in outcome.episodes
    }


async def undisturbed(numbers, world="Noting"):
    """The groups as this process plays them, one after another."""
    player = noting.group_player(engine_of(), world)
    return records_of([await player.play(noting.prompt(number), 0) for number in numbers])


def players_of(folder, launcher, world="Noting"):
    plan, lines = PlayerPlan("tests.rollout.noting_process", world.encode(), folder), []
    players = Players(launcher, plan, engine_of(), Activities(), lines.append)
    return players.in_place_of(noting.group_player(None, world)), lines


async def until(condition):
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv(noting.FILE, str(tmp_path / "expected"))
    return tmp_path / "notes"


async def played(players, launcher, path, numbers, leaving):
    """The groups, of which those of one player are in play when its machine begins to go away."""
    pid = str(await players.processes[leaving].pid())
    # One that is still starting may lose its groups to another that has played its own.
    await until(lambda: all(player.is_open for player in players._pool.members))
    playing = [asyncio.create_task(players.play(noting.prompt(number), 0)) for number in numbers]
    await until(lambda: sum(note[0] == pid for note in noting.notes(path)) >= 2)
    launcher.leave(leaving)
    return pid, await asyncio.gather(*playing)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
async def test_groups_in_play_go_on_elsewhere_token_for_token(tmp_path, path, monkeypatch, size):
    """With one player, they wait for the next process of it."""
    numbers = range(4)
    expected = await undisturbed(numbers)
    calls = Counter(note[2:] for note in noting.notes(tmp_path / "expected"))
    monkeypatch.setenv(noting.FILE, str(path))
    players, lines = players_of(tmp_path, launcher := Machines(size))
    async with players:
        pid, outcomes = await played(players, launcher, path, numbers, size - 1)
        assert records_of(outcomes) == expected
        # No call was made twice, and the player did not make all of those of its groups.
        noted = noting.notes(path)
        assert Counter(note[2:] for note in noted) == calls
        of_player = {note[2] for note in noted if note[0] == pid}
        assert any(note[0] != pid for note in noted if note[2] in of_player)
        await until(
            lambda: launcher.events[size - 1] and players.processes[size - 1].name.split()[-1][:-1] != pid
        )
        assert (await players.play(noting.prompt(9), 0)).group is not None
    (line,) = lines
    moved = "g0, g1, g2, g3" if size == 1 else "g1, g3"
    who = f"player {size - 1} (process {pid})"
    what = f"groups {moved} go on elsewhere from where they are"
    assert line == f"{who}: its machine is going away in 60 s; {what}."


@pytest.mark.full
async def test_groups_whose_world_saves_no_state_end_where_they_are(tmp_path, path, monkeypatch):
    expected = await undisturbed(range(2), "Oblivious")
    monkeypatch.setenv(noting.FILE, str(path))
    players, lines = players_of(tmp_path, launcher := Machines(2), "Oblivious")
    async with players:
        pid, outcomes = await played(players, launcher, path, range(2), 1)
        assert records_of(outcomes) == expected
        assert {note[2] for note in noting.notes(path) if note[0] == pid} == {"101"}
    who, what = f"player 1 (process {pid})", "groups g1 end there, if they do so in time"
    assert lines == [f"{who}: its machine is going away in 60 s; {what}."]


async def test_a_player_whose_machine_is_going_away_gets_no_new_group(tmp_path):
    engine = Engine()
    engine.is_held.clear()
    players, lines = players_in(tmp_path, engine, launcher := Machines(2))
    async with players:
        await until(lambda: all(player.is_open for player in players._pool.members))
        first = await in_flight(players, engine, short_prompt(0))
        launcher.leave(1)
        others = [asyncio.create_task(players.play(short_prompt(index), 0)) for index in (1, 2)]
        await until(lambda: len(engine.sessions) == 6)
        assert players._pool.groups.dispatch.of(0) == [0, 1, 2]
        engine.is_held.set()
        await asyncio.gather(first, *others)
        await until(lambda: players._pool.members[1].is_open)
    (line,) = lines
    assert line.endswith("its machine is going away in 60 s; no group was in play.")


async def test_a_cancelled_group_that_waits_for_a_player_ends_at_once(tmp_path):
    engine = Engine()
    engine.is_held.clear()
    players, _ = players_in(tmp_path, engine, launcher := Machines(1))
    async with players:
        first = await in_flight(players, engine, short_prompt(0))
        launcher.leave(0)
        waiting = asyncio.create_task(players.play(short_prompt(1), 0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(waiting, return_exceptions=True)
        assert len(players.cancelled(short_prompt(1)).finished) == 2
        engine.is_held.set()
        assert (await first).group.id == "g0"
    assert len(engine.sessions) == 2


async def test_a_player_that_has_left_is_held_no_more_and_its_next_process_is(tmp_path):
    async with players_at_a_server(tmp_path, launcher := Machines(1)) as (players, clients, _):
        await players.play(short_prompt(0), version=0)
        pid = await players.processes[0].pid()
        launcher.leave(0)
        await until(lambda: players._pool.members[0].is_open and str(pid) not in players.processes[0].name)
        async with asyncio.timeout(30), clients.held():
            playing = asyncio.create_task(players.play(short_prompt(1), version=0))
            await asyncio.sleep(0.3)
            assert not playing.done()
        assert (await playing).group.id == "g1"
