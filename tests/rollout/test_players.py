"""Players: no group is lost, whatever ends; requests, clocks and errors are those of the driver's engine."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.resuming import StoppableEpisodes
from agentrl.errors import EnvCodeError, StageError, TokenLawError, WorldBrokenError
from agentrl.rollout.group import GroupInProgress
from agentrl.rollout.players.dispatch import Dispatch
from agentrl.rollout.players.local import LocalPlayers
from tests.rollout.player_scenarios import FAULTS, SCENARIOS, Engine, in_flight, players_in, prompt
from tests.trainer.megatron.launching import alive


@given(st.integers(1, 4), st.lists(st.integers(0, 16), max_size=60))
def test_a_group_is_at_the_least_loaded_player_until_it_ends(size, events):
    """A player that is not open, or whose machine is going away, gets groups only where all are away."""
    dispatch, at, away, ordinal = Dispatch(size), {}, set(range(size)), 0

    def expect(group):
        loads = [(player in away, len(dispatch.of(player))) for player in range(size)]
        loads[at[group]] = (at[group] in away, len(dispatch.of(at[group])) - 1)
        assert loads[at[group]] == min(loads)

    for event in events:
        player = event % size
        if event < 5 or not at:
            at[ordinal] = dispatch.start(ordinal)
            expect(ordinal)
            ordinal += 1
        elif event < 8:
            ended = sorted(at)[event % len(at)]
            dispatch.end(ended)
            del at[ended]
        elif event < 10:
            away.add(player)
            dispatch.lost(player, was_open=True)
        elif event < 11:
            dispatch.opened(player)
            away.discard(player)
        elif event < 13:
            away.add(player)
            dispatch.avoid(player)
        elif event < 15:
            moved = sorted(at)[event % len(at)]
            if event < 14:
                dispatch.move(moved)
                at[moved] = dispatch.at(moved)
                expect(moved)
            else:
                dispatch.move(moved, player)
                at[moved] = player
        else:
            away.add(player)
            dispatch.leave(player)
            left = [group for group in at if at[group] == player]
            at |= {group: dispatch.at(group) for group in left}
            assert len(away) == size or not dispatch.of(player)
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


async def test_a_stop_leaves_the_groups_of_a_player_that_is_not_up_as_they_came(tmp_path):
    players, lines = players_in(tmp_path, Engine(), LocalPlayers(1), episodes=StoppableEpisodes())
    begun = GroupInProgress(3, ((), ()), (None, None))
    async with players, asyncio.timeout(5.0):
        new = asyncio.create_task(players.play(prompt(0), version=4))
        resumed = asyncio.create_task(players.play(prompt(1), version=4, begun=begun))
        await asyncio.sleep(0)
        await players.stop()
        assert (await resumed).in_progress is begun
        with pytest.raises(asyncio.CancelledError):
            await new
    assert not lines


class Failing(LocalPlayers):
    """From the start of that number on, no process can be started."""

    def __init__(self, size, allowed):
        super().__init__(size)
        object.__setattr__(self, "left", iter(range(allowed)))
        object.__setattr__(self, "started", [])

    def start(self, *args):
        if next(self.left, None) is None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        self.started.append(super().start(*args))
        return self.started[-1]


async def test_a_player_that_cannot_be_started_again_ends_the_run_with_a_sentence(tmp_path):
    engine = Engine()
    engine.is_held.clear()
    players, _ = players_in(tmp_path, engine, Failing(1, 1))
    async with players, asyncio.timeout(60.0):
        playing = await in_flight(players, engine, prompt(0))
        os.kill(await players.processes[0].pid(), signal.SIGKILL)
        with pytest.raises(WorldBrokenError, match=r"no other can be started \(.*temporarily"):
            await playing


async def test_a_player_that_cannot_be_started_at_first_leaves_none_behind(tmp_path):
    launcher = Failing(2, 1)
    players, _ = players_in(tmp_path, Engine(), launcher)
    with pytest.raises(OSError, match="temporarily"):
        await players.__aenter__()
    (first,) = launcher.started
    assert not alive(await first.pid())


async def test_a_player_without_a_group_takes_those_of_one_that_stands_still_while_it_starts(tmp_path):
    players, lines = players_in(tmp_path, Engine(), LocalPlayers(2))
    async with players, asyncio.timeout(60.0):
        os.kill(await players.processes[0].pid(), signal.SIGSTOP)
        assert (await players.play(prompt(0), version=0)).group.id == "g0"
    assert not lines


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_players_that_are_child_processes(scenario, tmp_path):
    await scenario(tmp_path, LocalPlayers)


@pytest.mark.faults
@pytest.mark.parametrize("scenario", FAULTS.values(), ids=FAULTS)
async def test_players_that_are_child_processes_and_end(scenario, tmp_path):
    await scenario(tmp_path, LocalPlayers)
