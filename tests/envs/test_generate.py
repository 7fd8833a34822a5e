"""A generate function orders turns and steps; what is recorded is recorded as `play` does."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from agentrl import GroupReward, Message, ScriptedAgent, Step, UserError, call, make, play, say
from agentrl.algorithms.samples import samples_of
from agentrl.envs.contract import check_generate, check_group_reward, check_reward
from agentrl.envs.generate import EpisodeEndedError, generating
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.tools import inline
from agentrl.types import Author, Ending, Finish
from examples.second_look.second_look import ASK, ahead, second_look
from tests.rollout.test_agent import Letters
from tests.worlds import ASK as TASK
from tests.worlds import QUICK, Hang, Parrot, Reciter, Speaker, Talk, raising, turn_tokens

AGAIN = Message("user", "again")


def script(*actions):
    for action in actions:
        _ = yield action


async def turn_by_turn(episode):
    """As `play` does."""
    await episode.reset()
    while not episode.is_over:
        await episode.step(await episode.act())


async def played(generate, *actions, env=None):
    return await generating(generate)(env or Parrot(), ScriptedAgent(script(*actions)), TASK, seed=5)


@pytest.mark.parametrize(
    "actions",
    [
        (call("add", a=2), say("3")),
        (call("add"), say("no")),
        (call("add", a=1),) * 9,
        (call("nothing", x=1), say("3")),
    ],
)
async def test_turn_by_turn_is_what_play_does(actions):
    expected = await play(Parrot(), ScriptedAgent(script(*actions)), TASK, seed=5)
    episode = await played(turn_by_turn, *actions)
    assert (episode.ending, episode.step_rewards, episode.events, episode.id) == (
        expected.ending,
        expected.step_rewards,
        expected.events,
        expected.id,
    )
    assert [(t.observation, t.action, t.step) for t in episode.turns] == [
        (t.observation, t.action, t.step) for t in expected.turns
    ]


async def test_the_example_asks_again_and_the_second_answer_counts():
    episode = await played(second_look, call("add", a=2), say("4"), say("3"))
    assert episode.ending is Ending.COMPLETED
    assert [turn.action for turn in episode.turns] == [call("add", a=2), say("4"), say("3")]
    assert episode.turns[2].observation == (ASK,)
    # The turn that the world did not see has no reward, and the last one has its own.
    assert episode.step_rewards == episode.rewards_of() == (None, None, 1.0)
    worse = await played(second_look, say("3"), say("4"))
    assert worse.total_of() == 0.0


async def test_every_sampled_token_is_the_policys_and_every_other_the_worlds():
    policy = Reciter(lambda turn, sampling: [50 + turn, 60 + turn], version=7)
    agent = TokenAgent(policy, Letters(), SamplingSettings())

    async def twice(episode):
        await episode.reset()
        await episode.act()
        await episode.act(AGAIN)
        await episode.step(await episode.act(AGAIN))

    env = Talk(steps=[Step.finished(reward=1.0)])
    env.limits = dataclasses.replace(QUICK, max_tokens=100)
    episode = await generating(twice)(env, agent, TASK)
    assert episode.failure is None
    (sample,) = samples_of(episode)
    again = [2, *map(ord, "again")]
    assert sample.token_ids.tolist() == [1, *map(ord, "How many?"), 50, 60, *again, 51, 61, *again, 52, 62]
    assert sample.token_ids[sample.loss_mask].tolist() == [50, 60, 51, 61, 52, 62]
    assert set(sample.author[sample.loss_mask].tolist()) == {Author.POLICY}
    assert set(sample.versions[sample.loss_mask].tolist()) == {7}
    # Each prompt is all tokens before, as they were sampled.
    assert policy.prompts[2] == sample.token_ids.tolist()[:-2]
    assert env.actions == [Message("assistant", "2")]


async def test_another_message_than_the_last_may_be_passed_on():
    async def first_of_two(episode):
        await episode.reset()
        answer = await episode.act()
        await episode.act(AGAIN)
        await episode.step(answer)

    episode = await played(first_of_two, say("3"), say("4"))
    assert episode.rewards_of() == (None, 1.0)


async def test_limits_hold_whatever_the_function_does():
    async def forever(episode):
        await episode.reset()
        while True:
            try:
                await episode.act(AGAIN)
            except EpisodeEndedError:
                # Nor does swallowing the end gain a turn.
                with pytest.raises(EpisodeEndedError):
                    await episode.act(AGAIN)
                with pytest.raises(EpisodeEndedError):
                    await episode.step(say("3"))
                raise

    episode = await played(forever)
    assert (len(episode.turns), episode.ending) == (QUICK.max_turns, Ending.TRUNCATED)
    assert episode.step_rewards == (None,) * (QUICK.max_turns - 1)


@pytest.mark.parametrize(
    ("finish", "ending"), [(Finish.LENGTH, Ending.TRUNCATED), (Finish.ABORT, Ending.ABORTED)]
)
async def test_the_world_never_gets_an_unfinished_turn(finish, ending):
    env = Talk()
    episode = await generating(turn_by_turn)(env, Speaker(tokens=[turn_tokens(1, 2, finish)]), TASK)
    assert episode.ending is ending
    assert env.actions == []


async def test_a_function_that_returns_early_truncates():
    async def one_turn(episode):
        assert (await episode.reset())[0].text == "How many?"
        shown = await episode.step(await episode.act())
        assert [message.text for message in shown] == ["3"]
        assert (episode.task, episode.limits, episode.is_over) == (TASK, QUICK, False)

    episode = await played(one_turn, call("add", a=2))
    assert (episode.ending, len(episode.turns)) == (Ending.TRUNCATED, 1)


async def fails(episode):
    await episode.reset()
    raise KeyError("x")


async def nothing(episode):
    await episode.reset()


async def acts_before_reset(episode):
    await episode.act()


async def acts_on_nothing(episode):
    await episode.reset()
    await episode.act()
    await episode.act()


async def steps_first(episode):
    await episode.reset()
    await episode.step(say("3"))


def no_coroutine(episode):
    return None


@pytest.mark.parametrize(
    ("generate", "kind", "detail"),
    [
        (fails, "error", "KeyError: 'x'"),
        (nothing, "invalid", "it returned without a turn; call reset(), then act()"),
        (acts_before_reset, "invalid", "act() needs a reset(), a step() or a message to act on"),
        (acts_on_nothing, "invalid", "act() needs a reset(), a step() or a message to act on"),
        (steps_first, "invalid", "step() needs an act() before it"),
        (no_coroutine, "error", "TypeError: "),
    ],
)
async def test_a_function_that_fails_is_a_failed_episode_and_its_check_a_sentence(generate, kind, detail):
    env, agent = Talk(), Speaker()
    episode = await generating(generate)(env, agent, TASK)
    assert (episode.ending, episode.failure.stage, episode.failure.kind) == (Ending.FAILED, "generate", kind)
    assert episode.failure.detail.startswith(detail)
    assert (env.closed, len(agent.closed)) == (1, 1)
    with pytest.raises(ValueError, match="it failed on the task `quiz`"):
        await check_generate(generate)


async def test_failures_of_the_world_are_those_of_play():
    episode = await generating(turn_by_turn)(Talk({"reset": raising(OSError("down"))}), Speaker(), TASK)
    assert episode.failure.name == "reset_error"
    hang = Hang()
    env = Talk({"step": hang})
    env.limits = dataclasses.replace(QUICK, step_timeout_s=0.02)
    episode = await generating(turn_by_turn)(env, Speaker(), TASK)
    assert episode.failure.name == "step_timeout"
    assert hang.released


async def test_cancelling_it_closes_everything():
    hang = Hang()
    env, agent = Talk({"step": hang}), Speaker()
    task = asyncio.create_task(generating(turn_by_turn)(env, agent, TASK))
    await hang.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (env.closed, len(agent.closed), hang.released) == (1, 1, True)


async def test_an_environment_of_several_agents_is_refused():
    env = make("RockPaperScissors-v0")
    agents = {name: Speaker() for name in env.possible_agents}
    with pytest.raises(UserError, match="has several agents, and a generate function plays one; leave out"):
        await generating(turn_by_turn)(env, agents, env.tasks("train")[0])


async def test_the_example_and_any_lawful_function_pass_their_checks():
    await check_generate(second_look)
    await check_generate(second_look, Parrot, TASK)
    await check_group_reward(GroupReward(ahead))
    await check_group_reward(GroupReward(ahead), Parrot, TASK)


async def test_a_function_that_draws_at_random_is_named():
    numbers = itertools.count(1)

    async def sometimes(episode):
        await episode.reset()
        for _ in range(next(numbers)):
            await episode.act(AGAIN)

    with pytest.raises(ValueError, match=r"went otherwise; draw with random.Random\(episode.seed\)"):
        await check_generate(sometimes)


async def test_a_world_that_fails_is_no_fault_of_what_is_checked():
    def down():
        return Talk({"reset": raising(OSError("down"))})

    await check_generate(turn_by_turn, down, TASK)
    await check_group_reward(GroupReward(lambda siblings: None, name="none"), down, TASK)


@inline
def one_for_all(siblings):
    return 1.0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (one_for_all, "`one_for_all` returned 1.0; return one number for each of 2 siblings"),
        (lambda: [1.0, 1.0], "takes 0 positional arguments but 1 was given"),
        (lambda siblings: [float("nan")] * 2, "is nan, return a finite number"),
        (lambda siblings: [{"nobody": 1.0}] * 2, "names 'nobody', which is no agent"),
        (lambda siblings: [siblings[0].turns[9]], "IndexError"),
    ],
)
async def test_a_group_reward_that_cannot_work_is_a_sentence(function, sentence):
    name = function.__name__ if function is one_for_all else "mine"
    with pytest.raises(ValueError, match=sentence):
        await check_group_reward(GroupReward(function, name=name))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda task, answer: 1 / len(answer), "the reward of the answer '' failed .*ZeroDivisionError"),
        (lambda task, answer: "good", "the reward of the answer '2' failed .*finite number"),
        (lambda task, answer: task.metadata["answers"], "KeyError: 'answers'"),
    ],
)
async def test_a_reward_that_cannot_work_is_a_sentence(function, sentence):
    with pytest.raises(ValueError, match=sentence):
        await check_reward(function)
    await check_reward(lambda task, answer: {"right": float(answer == task.answer)})


async def test_the_seed_of_an_episode_is_its_own_and_the_same_when_it_is_replayed():
    async def seed_of(**options):
        seeds = []

        async def records(episode):
            seeds.append(episode.seed)
            await turn_by_turn(episode)

        await generating(records)(Parrot(), ScriptedAgent(script(say("3"))), TASK, **options)
        return seeds[0]

    first = await seed_of(seed=5, episode_id="g7-0", sampling_seed=1)
    # The journal does not record how the agent sampled.
    assert await seed_of(seed=5, episode_id="g7-0") == first
    assert await seed_of(seed=5, episode_id="g7-1", sampling_seed=1) != first
    assert await seed_of(seed=6, episode_id="g7-0", sampling_seed=1) != first
