"""Who plays the agents that are not trained."""

from __future__ import annotations

import pytest

from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.envs.check.subject import seats
from agentrl.envs.opponents import scripted
from agentrl.errors import UserError
from agentrl.rendering.config import RenderingConfig
from envs_contrib.solver_critic import SolverCritic
from envs_contrib.tau2 import Tau2

SETUP = OpponentSetup(RenderingConfig())


async def opponents_of(env, **chosen):
    async with opened_opponents(chosen, env, {}, SETUP) as opponents:
        return opponents


async def test_an_agent_that_is_a_part_of_the_world_has_its_script_and_others_are_the_policys():
    assert await opponents_of(Tau2("airline")) == {"user": scripted}
    assert await opponents_of(SolverCritic()) == {}


async def test_another_player_of_it_can_be_named():
    (name, opponent) = next(iter((await opponents_of(Tau2("airline"), user="http://127.0.0.1:9/v1")).items()))
    assert name == "user"
    assert opponent is not scripted


async def test_somebody_is_left_for_the_policy():
    with pytest.raises(UserError, match="leave one out for the policy"):
        await opponents_of(Tau2("airline"), assistant="script")


def test_a_check_takes_the_seats_of_the_others():
    assert [*seats(lambda: Tau2("airline"), Tau2("airline"))] == ["assistant"]
    assert [*seats(SolverCritic, SolverCritic())] == ["solver", "critic"]
