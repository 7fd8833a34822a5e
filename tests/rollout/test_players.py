"""Players: no group is lost, whatever ends; requests, clocks and errors are those of the driver's engine."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.resuming import StoppableEpisodes
from agentrl.errors import EnvCodeError, StageError, TokenLawError
from agentrl.rollout.group import GroupInProgress
from agentrl.rollout.players.dispatch import Dispatch
from agentrl.rollout.players.local import LocalPlayers
from tests.rollout.player_scenarios import FAULTS, SCENARIOS, Engine, players_in, prompt


@given(st.integers(1, 4), st.lists(st.integers(0, 16), max_size=60))
def test_a_group_is_at_the_least_loaded_player_until_it_ends(size, events):
    """A player whose machine is gone, or is going away, gets groups only where all are away."""
    dispatch, at, away, ordinal = Dispatch(size), {}, set(), 0

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
            dispatch.lost(player, was_open=True)
        elif event < 11:
            dispatch.opened(player)
            away.discard(player)
        elif event < 13:
            away.add(player)
            dispatch.avoid(player)
        elif event < 15:
            moved = sorted(at)[event % len(at)]
            dispatch.move(moved)
            at[moved] = dispatch.at(moved)
            expect(moved)
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


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_players_that_are_child_processes(scenario, tmp_path):
    await scenario(tmp_path, LocalPlayers)


@pytest.mark.faults
@pytest.mark.parametrize("scenario", FAULTS.values(), ids=FAULTS)
async def test_players_that_are_child_processes_and_end(scenario, tmp_path):
    await scenario(tmp_path, LocalPlayers)
