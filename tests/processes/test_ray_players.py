"""Players on a real Ray do what they do as child processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentrl.processes.placement import PlayerNeeds, layout_of
from agentrl.processes.ray.placement import placed
from agentrl.rollout.players import players as players_module
from agentrl.rollout.players.ray_players import RayPlayers
from tests.environ import environment_of
from tests.rollout.player_scenarios import (
    FAULTS,
    SCENARIOS,
    SILENT_S,
    Engine,
    in_flight,
    pids_of,
    players_in,
    prompt,
)
from tests.trainer.megatron.launching import alive


@pytest.fixture(scope="module")
def launched(session):
    """A function from a number to that many allocations."""
    placement = placed(session, layout_of(None, [], [PlayerNeeds(0.5, 0)] * 2, colocate=False), 60)
    yield lambda number: RayPlayers(session, placement.group, placement.players[:number])
    placement.remove()


async def test_a_player_on_ray_plays_without_the_token_of_the_cluster(tmp_path, launched):
    assert os.environ["RAY_AUTH_TOKEN"]
    players, lines = players_in(tmp_path, Engine(), launched(1))
    async with players:
        assert (await players.play(prompt(0), version=0)).group.id == "g0"
        (pid,) = await pids_of(players)
        assert not [line for line in environment_of(pid) if line.startswith("RAY_AUTH_TOKEN")]
    assert not lines


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_players_on_ray(scenario, tmp_path, launched):
    await scenario(tmp_path, launched)


@pytest.mark.faults
@pytest.mark.parametrize("scenario", FAULTS.values(), ids=FAULTS)
async def test_players_on_ray_that_end(scenario, tmp_path, launched):
    await scenario(tmp_path, launched)


@pytest.mark.faults
async def test_a_player_whose_actor_hangs_is_replaced_and_ends_with_it(tmp_path, launched, monkeypatch):
    monkeypatch.setattr(players_module, "SILENT_S", SILENT_S)
    engine = Engine()
    engine.is_held.clear()
    players, lines = players_in(tmp_path, engine, launched(1))
    async with players:
        playing = await in_flight(players, engine, prompt(1))
        (pid,), (player,) = await pids_of(players), players.processes
        os.kill(actor_of(player), signal.SIGSTOP)
        engine.is_held.set()
        assert (await playing).group.id == "g1"
        while alive(pid):
            await asyncio.sleep(0.05)
    (line,) = lines
    assert f"has sent nothing for {SILENT_S:g} s, and was ended; groups g1 are played again" in line


def actor_of(player):
    """The process of its actor."""
    return int(player.name.split("process ")[1].split()[0])


@pytest.mark.faults
async def test_a_player_ends_with_its_actor_and_another_one_plays_its_group(tmp_path, launched):
    engine = Engine()
    engine.is_held.clear()
    players, lines = players_in(tmp_path, engine, launched(1))
    async with players:
        playing = await in_flight(players, engine, prompt(1))
        (pid,), (player,) = await pids_of(players), players.processes
        os.kill(actor_of(player), signal.SIGKILL)
        engine.is_held.set()
        assert (await playing).group.id == "g1"
        assert not Path(f"/proc/{pid}").exists()
    (line,) = lines
    assert "was killed, or crashed; groups g1 are played again" in line
