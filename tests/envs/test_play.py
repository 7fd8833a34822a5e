"""The episode loop: every ending, every deadline, and no leaked resources."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys

import pytest

from agentrl import Limits, Message, ScriptedAgent, Step, Task, ToolEnv, UserError, call, play, say
from agentrl.types import Ending, Finish, Restart
from tests.worlds import ASK, QUICK, Hang, Parrot, Speaker, Talk, raising, turn_tokens

SHORT_S = 0.02


def limits(**changed):
    return dataclasses.replace(QUICK, **changed)


def script(*actions):
    for action in actions:
        _ = yield action


def talking(env, limits_=QUICK):
    env.limits = limits_
    return env


class Reward(Parrot):
    """Gives configured rewards."""

    def __init__(self, give):
        super().__init__()
        self.give = give

    def reward(self, task, answer):
        return self.give()


async def test_the_world_ends_an_episode_and_its_answers_are_recorded():
    env = Parrot()
    episode = await play(env, ScriptedAgent(script(call("add", a=2), say("3"))), ASK, seed=5, episode_id="x")
    assert (episode.ending, episode.failure) == (Ending.COMPLETED, None)
    assert episode.step_rewards == (None, 1.0)
    assert [turn.observation[-1].content for turn in episode.turns] == ["How many?", "3"]
    assert [turn.action for turn in episode.turns] == [call("add", a=2), say("3")]
    assert (episode.id, episode.env_id, episode.task, episode.seed) == ("x", "Parrot-v0", ASK, 5)
    assert episode.limits == QUICK
    assert episode.events["tool_calls"] == 1


@pytest.mark.parametrize(
    ("step", "ending"),
    [
        (Step.finished(reward=0.5), Ending.COMPLETED),
        (Step.cut(reward=0.5), Ending.TRUNCATED),
        (Step((), 0.5, True, True, {}), Ending.COMPLETED),
    ],
)
async def test_a_step_sets_the_ending_of_the_episode(step, ending):
    episode = await play(Talk(steps=[step]), Speaker(), ASK)
    assert episode.ending is ending
    assert episode.step_rewards == (0.5,)


async def test_the_limit_of_turns_truncates_after_exactly_so_many():
    env = talking(Talk(), limits(max_turns=3))
    episode = await play(env, Speaker(), ASK)
    assert episode.ending is Ending.TRUNCATED
    assert len(episode.turns) == len(env.actions) == 3
    assert episode.step_rewards == (None, None, None)


@pytest.mark.parametrize(
    ("finish", "ending"), [(Finish.LENGTH, Ending.TRUNCATED), (Finish.ABORT, Ending.ABORTED)]
)
async def test_an_unfinished_message_ends_the_episode_and_never_reaches_the_world(finish, ending):
    env = Talk()
    agent = Speaker(tokens=[turn_tokens(2, 3), turn_tokens(2, 3, finish)])
    episode = await play(env, agent, ASK)
    assert episode.ending is ending
    assert len(env.actions) == 1
    assert len(episode.turns) == 2
    assert episode.step_rewards == (None,)


@pytest.mark.parametrize("most", [100, None])
async def test_the_session_of_the_agent_has_max_tokens(most):
    agent = Speaker(tokens=[turn_tokens(10, 4), turn_tokens(3, 5)])
    await play(talking(Talk(), limits(max_tokens=most, max_turns=2)), agent, ASK)
    assert [session.max_tokens for session in agent.sessions] == [most, most]


async def test_a_restart_begins_another_trajectory_with_its_reason():
    restarts = {1: Restart.TOOLS_CHANGED, 3: Restart.REASONING_STRIPPED}
    agent = Speaker(tokens=[turn_tokens(n + 1, 4) for n in range(5)], restarts=restarts)
    episode = await play(talking(Talk(), limits(max_turns=5)), agent, ASK)
    sizes = [[len(turn.tokens.world_ids) for turn in trajectory.turns] for trajectory in episode.trajectories]
    assert sizes == [[1], [2, 3], [4, 5]]
    assert [(trajectory.parent, trajectory.reason) for trajectory in episode.trajectories] == [
        (None, None),
        (0, Restart.TOOLS_CHANGED),
        (1, Restart.REASONING_STRIPPED),
    ]


async def test_every_turn_samples_with_its_own_seed_and_the_same_seeds_come_again():
    async def seeds(sampling_seed):
        agent = Speaker()
        await play(Talk(), agent, ASK, sampling_seed=sampling_seed, episode_id="x")
        assert {session.id for session in agent.sessions} == {"x"}
        return [session.seed for session in agent.sessions]

    first = await seeds(1)
    assert len(set(first)) == len(first)
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)


async def test_the_agent_gets_the_tool_schemas_of_after_reset():
    class Late(Talk):
        @property
        def tool_schemas(self):
            return ("after",) if self.rng.random() == seeded else ("before",)

    import random

    seeded = random.Random(9).random()
    schemas = []

    class Looks(Speaker):
        async def act(self, observation, *, tools, session):
            schemas.append(tools)
            return await super().act(observation, tools=tools, session=session)

    await play(Late(), Looks(), ASK, seed=9)
    assert schemas[0] == ("after",)


@pytest.mark.parametrize("stage", ["reset", "step"])
async def test_a_world_that_raises_is_data_not_a_crash(stage):
    env, agent = Talk({stage: raising(RuntimeError("no disk"))}), Speaker()
    episode = await play(env, agent, ASK, episode_id="x")
    assert episode.ending is Ending.FAILED
    assert (episode.failure.stage, episode.failure.kind) == (stage, "error")
    assert "no disk" in episode.failure.detail
    assert (env.closed, agent.closed) == (1, ["x"])


async def test_a_world_that_fails_in_its_third_step_keeps_the_turns_before_it():
    env = Talk()
    steps = 0

    async def third():
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError

    env.on = {"step": third}
    episode = await play(env, Speaker(), ASK)
    assert episode.failure.stage == "step"
    assert len(episode.turns) == 3
    assert episode.step_rewards == (None, None)


async def test_an_agent_that_raises_fails_the_episode_at_act():
    class Mute(Speaker):
        async def act(self, observation, *, tools, session):
            raise OSError("engine gone")

    episode = await play(Talk(), Mute(), ASK)
    assert episode.failure.name == "act_error"


@pytest.mark.parametrize("stage", ["reset", "step"])
async def test_the_deadline_of_a_stage_ends_a_world_that_hangs_in_it(stage):
    hang = Hang()
    env = talking(Talk({stage: hang}), limits(**{f"{stage}_timeout_s": SHORT_S}))
    episode = await play(env, Speaker(), ASK)
    assert episode.failure.name == f"{stage}_timeout"
    assert hang.entered.is_set()
    assert hang.released
    assert env.closed == 1


@pytest.mark.parametrize("stage", ["reset", "step"])
async def test_the_deadline_of_the_episode_applies_in_every_stage(stage):
    hang = Hang()
    env = talking(Talk({stage: hang}), limits(episode_timeout_s=SHORT_S))
    episode = await play(env, Speaker(), ASK)
    assert episode.failure.name == "episode_timeout"
    assert hang.entered.is_set()
    assert hang.released
    assert env.closed == 1


async def test_the_deadline_of_the_episode_applies_while_the_engine_hangs():
    hang = Hang()

    class Slow(Speaker):
        async def act(self, observation, *, tools, session):
            await hang()

    agent = Slow()
    episode = await play(talking(Talk(), limits(episode_timeout_s=SHORT_S)), agent, ASK, episode_id="x")
    assert episode.failure.name == "episode_timeout"
    assert hang.released
    assert agent.closed == ["x"]


async def test_the_deadline_of_the_reward_applies():
    hang = Hang()

    async def slowly():
        await hang()

    env = talking(Reward(slowly), limits(reward_timeout_s=SHORT_S))
    episode = await play(env, ScriptedAgent(script(say("3"))), ASK)
    assert episode.failure.name == "reward_timeout"
    # On a busy machine the deadline may end before the call begins.
    assert hang.released == hang.entered.is_set()


async def test_the_deadline_of_a_tool_is_text_for_the_model_and_the_episode_goes_on():
    hang = Hang()

    class Slow(Parrot):
        limits = limits(tool_timeout_s=SHORT_S)

        async def wait(self) -> str:
            """Wait."""
            await hang()
            return "never"

        tools = (wait,)

    env = Slow()
    texts = []

    def patient():
        texts.append((yield call("wait")))
        yield say("3")

    episode = await play(env, ScriptedAgent(patient()), ASK)
    assert episode.ending is Ending.COMPLETED
    assert texts == ["wait was stopped: it took longer than 0.02 s."]
    assert (episode.counts["tool_calls"], episode.counts["tool_timeouts"]) == (1, 1)
    assert hang.released


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_no_number_fails_the_episode_at_reward(reward):
    from_tool_env = await play(Reward(lambda: reward), ScriptedAgent(script(say("3"))), ASK)
    assert from_tool_env.failure.name == "reward_invalid"
    from_step = await play(Talk(steps=[Step.going(reward=reward)]), Speaker(), ASK)
    assert from_step.failure.name == "reward_invalid"
    assert from_step.step_rewards == ()


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_user_errors_propagate_and_everything_is_closed(where):
    env, agent = Talk({where: raising(UserError("set the key"))}), Speaker()
    with pytest.raises(UserError, match="set the key"):
        await play(env, agent, ASK, episode_id="x")
    assert (env.closed, agent.closed) == (1, ["x"])


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_cancelling_closes_the_world_and_the_agent(where):
    hang, agent = Hang(), Speaker()
    env = Talk({where: hang})
    task = asyncio.create_task(play(env, agent, ASK, episode_id="x"))
    await hang.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hang.released
    assert (env.closed, agent.closed) == (1, ["x"])


@pytest.mark.parametrize("broken", ["world", "agent"])
async def test_a_cancellation_is_not_swallowed_by_a_close_that_raises(broken):
    hang = Hang()
    env = Talk({"step": hang})
    agent = Speaker()
    if broken == "world":
        env.on["close"] = raising(RuntimeError("close"))
    else:
        agent.on_close = raising(RuntimeError("close"))
    task = asyncio.create_task(play(env, agent, ASK, episode_id="x"))
    await hang.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (env.closed, agent.closed) == (1, ["x"])


@pytest.mark.parametrize("broken", ["world", "agent"])
async def test_what_was_played_stands_where_a_close_raises_and_the_other_is_closed_all_the_same(
    broken, caplog, monkeypatch
):
    monkeypatch.setattr(sys.modules["agentrl.envs.play"], "_logged", set())
    env, agent = Talk(steps=[Step.finished(reward=1.0)]), Speaker()
    if broken == "world":
        env.on = {"close": raising(RuntimeError("still open"))}
    else:
        agent.on_close = raising(RuntimeError("still open"))
    episode = await play(env, agent, ASK, episode_id="x")
    assert (episode.ending, episode.failure, episode.step_rewards) == (Ending.COMPLETED, None, (1.0,))
    assert episode.counts == {"failed_closes": 1}
    assert "`close` fails: RuntimeError: still open" in caplog.text
    assert (env.closed, agent.closed) == (1, ["x"])


async def test_the_first_failure_is_reported_when_closing_fails_too():
    env = Talk({"reset": raising(RuntimeError("no disk")), "close": raising(AttributeError("handle"))})
    episode = await play(env, Speaker(), ASK)
    assert episode.failure.name == "reset_error"
    assert "no disk" in episode.failure.detail
    assert episode.counts == {"failed_closes": 1}


async def test_a_close_that_hangs_times_out(monkeypatch):
    monkeypatch.setattr(sys.modules["agentrl.envs.boundary"], "CLOSE_S", SHORT_S)
    hang = Hang()
    env = Talk({"close": hang}, [Step.finished(reward=1.0)])
    episode = await play(env, Speaker(), ASK)
    assert (episode.ending, episode.counts) == (Ending.COMPLETED, {"failed_closes": 1})
    assert hang.released


async def test_closing_is_not_cut_short_by_the_deadline_of_the_episode():
    finished = False

    async def slowly():
        nonlocal finished
        await asyncio.sleep(3 * SHORT_S)
        finished = True

    env = talking(Talk({"step": Hang(), "close": slowly}), limits(episode_timeout_s=SHORT_S))
    episode = await play(env, Speaker(), ASK)
    assert episode.failure.name == "episode_timeout"
    assert finished


async def test_an_episode_that_never_began_has_no_trajectory():
    episode = await play(Talk({"reset": raising(RuntimeError())}), Speaker(), ASK)
    assert episode.trajectories == ()
    assert episode.turns == ()


async def test_an_unnamed_episode_is_named_after_its_task_and_seeds():
    episode = await play(Talk(steps=[Step.finished(reward=1.0)]), Speaker(), ASK, seed=3, sampling_seed=4)
    assert episode.id == "ask-3-4"


async def test_a_script_that_runs_out_gives_an_empty_answer():
    episode = await play(Parrot(), ScriptedAgent(script()), ASK)
    assert episode.turns[0].action == Message("assistant", "")
    assert episode.step_rewards == (0.0,)


async def test_a_script_is_sent_what_the_world_answered():
    texts = []

    def listens():
        texts.append((yield call("echo", text="one")))
        texts.append((yield Message("assistant", tool_calls=call("echo", text="a").tool_calls * 2)))
        yield say("3")

    await play(Parrot(), ScriptedAgent(listens()), ASK)
    assert texts == ["one", "a\na"]


async def test_a_script_is_closed_with_its_episode():
    closed = []

    def endless():
        try:
            while True:
                yield call("echo", text="again")
        finally:
            closed.append(True)

    await play(Parrot(), ScriptedAgent(endless()), ASK)
    assert closed == [True]


async def test_limits_have_defaults_for_every_kind():
    class Plain(ToolEnv):
        def tasks(self, split):
            return [Task.ask("t", "?")]

        def reward(self, task, answer):
            return 1.0

    assert (await play(Plain(), ScriptedAgent(script(say("x"))), ASK)).limits == Limits()
    assert None not in dataclasses.astuple(Limits())
