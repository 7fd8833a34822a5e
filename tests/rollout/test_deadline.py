"""A group's deadline: a straggler ends at its turn, truncated, and its group is complete."""

from __future__ import annotations

import asyncio

import pytest

from agentrl import Message, say
from agentrl.algorithms.laws import TokenLaws
from agentrl.algorithms.samples import samples_of
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.rollout.agent import DeadlineAgent, SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.runtime.clocks import SharedDeadline, Waits
from agentrl.types import Ending, Finish, Step
from agentrl.types.seams import Act, Session
from tests.rollout.test_agent import Letters
from tests.worlds import ASK, Reciter, Speaker, Talk, raising, turn_tokens

PROMPT = Prompt(7, ASK, 1234)
MINUTE = 60.0
QUESTION = (Message("user", "How many?"),)


class Straggler(Speaker):
    """Ends its first turn, and never the second."""

    async def act(self, observation, *, tools, session):
        if self.sessions:
            await asyncio.Event().wait()
        return await super().act(observation, tools=tools, session=session)


def two_turns():
    return Talk(steps=[Step.going(Message("tool", "go on")), Step.finished(reward=1.0)])


def speaker(kind=Speaker):
    return kind(say("a"), say("b"), tokens=[turn_tokens(2, 1, Finish.STOP), turn_tokens(2, 1, Finish.STOP)])


class Held(Speaker):
    """Its second turn is held until the engine is back."""

    def __init__(self, back):
        super().__init__(say("a"), say("b"), tokens=[turn_tokens(2, 1, Finish.STOP)] * 2)
        self.back = back

    async def act(self, observation, *, tools, session):
        if self.sessions:
            await self.back.wait()
        return await super().act(observation, tools=tools, session=session)


def player(*agents, env=two_turns, timeout_s=0.05, retries=2, **settings):
    waiting = list(agents)
    return GroupPlayer(env, lambda: waiting.pop(0), Scorer(), 2, retries, 0, timeout_s=timeout_s, **settings)


def endings(outcome):
    return [episode.ending for episode in outcome.group.episodes]


async def test_a_straggler_keeps_its_turns_and_does_not_hold_up_its_sibling():
    straggler = speaker(Straggler)
    outcome = await asyncio.wait_for(player(speaker(), straggler).play(PROMPT, 0), MINUTE)
    first, second = outcome.group.episodes
    assert (first.ending, second.ending) == (Ending.COMPLETED, Ending.TRUNCATED)
    assert [verdict.total for verdict in outcome.group.verdicts] == [1.0, 0.0]
    turns = second.trajectories[0].turns
    assert [len(turn.tokens.completion.token_ids) for turn in turns] == [1, 0]
    assert turns[-1].tokens.completion.finish is Finish.LENGTH
    assert straggler.closed


class Silent(Reciter):
    """Samples nothing before a test ends."""

    async def generate(self, prompt_ids, sampling, *, session):
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_over", [False, True], ids=["while it samples", "before it renders"])
async def test_of_a_first_turn_that_is_cut_the_prompt_is_kept(is_over):
    """Else a trajectory would begin with no token of the world, which no batch may hold."""

    def agent(policy):
        return TokenAgent(policy(lambda turn, sampling: [50, 51]), Letters(), SamplingSettings())

    deadline = SharedDeadline(-1.0 if is_over else 0.05)
    late = DeadlineAgent(agent(Silent), deadline)
    session = Session("s", 3, 100)
    act = await late.act(QUESTION, tools=(), session=session)
    whole = Letters().render(QUESTION, ())
    assert act.tokens.world_ids.tolist() == whole
    assert len(act.tokens.completion.token_ids) == 0
    assert act.tokens.completion.finish is Finish.LENGTH
    # Up to the trajectory's limit, and once: a later turn is empty.
    short = DeadlineAgent(agent(Silent), SharedDeadline(-1.0))
    cut = await short.act(QUESTION, tools=(), session=Session("s", 3, 2))
    assert cut.tokens.world_ids.tolist() == whole[:2]
    again = await late.act(QUESTION, tools=(), session=session)
    assert not len(again.tokens.world_ids)


async def test_a_group_whose_straggler_never_sampled_can_be_trained_on():
    agents = [
        TokenAgent(policy(lambda turn, sampling: [50, 51]), Letters(), SamplingSettings(max_response_len=9))
        for policy in (Reciter, Silent)
    ]

    def env():
        return Talk(steps=[Step.finished(reward=1.0)])

    outcome = await asyncio.wait_for(player(*agents, env=env, timeout_s=0.2).play(PROMPT, 0), MINUTE)
    assert endings(outcome) == [Ending.COMPLETED, Ending.TRUNCATED]
    laws, group = TokenLaws(), outcome.group
    laws.check_episodes([group], version=0)
    samples = [sample for episode in group.episodes for sample in samples_of(episode)]
    laws.check_samples([group], samples)
    assert [int(sample.loss_mask.sum()) for sample in samples] == [2, 0]


async def test_without_a_deadline_a_straggler_is_waited_for():
    group = asyncio.create_task(player(speaker(), speaker(Straggler), timeout_s=float("inf")).play(PROMPT, 0))
    done, _ = await asyncio.wait([group], timeout=0.2)
    group.cancel()
    assert not done


async def test_no_episode_is_played_again_after_the_deadline():
    worlds = []

    def failing():
        worlds.append(Talk({"reset": raising(RuntimeError("no world"))}))
        return worlds[-1]

    agents = [speaker() for _ in range(6)]
    late = await player(*agents, env=failing, timeout_s=1e-9).play(PROMPT, 0)
    assert late.group is None
    assert len(worlds) == len(late.failed) == 2
    await player(*agents, env=failing, timeout_s=MINUTE, retries=1).play(PROMPT, 0)
    assert len(worlds) == 2 + 4


async def test_an_agents_own_timeout_is_no_deadline():
    class Overdue(Speaker):
        async def act(self, observation, *, tools, session):
            raise TimeoutError("the server took too long")

    agent = DeadlineAgent(Overdue(), SharedDeadline(MINUTE))
    with pytest.raises(TimeoutError, match="the server took too long"):
        await agent.act((), tools=(), session=None)
    ended = await DeadlineAgent(Straggler(say("a")), SharedDeadline(-1.0)).act((), tools=(), session=None)
    assert isinstance(ended, Act)


async def test_the_time_of_a_group_stands_still_while_the_engine_is_away():
    absence, back = Waits(), asyncio.Event()
    group = asyncio.create_task(player(speaker(), Held(back), timeout_s=0.3, absence=absence).play(PROMPT, 0))
    await asyncio.sleep(0.05)
    absence.leave()
    await asyncio.sleep(0.6)
    absence.come_back()
    await asyncio.sleep(0.05)
    back.set()
    outcome = await asyncio.wait_for(group, MINUTE)
    assert endings(outcome) == [Ending.COMPLETED, Ending.COMPLETED]


async def test_a_straggler_ends_by_the_time_before_and_after_the_engines_absence():
    absence, loop = Waits(), asyncio.get_running_loop()
    absence.leave()
    group = asyncio.create_task(
        player(speaker(), speaker(Straggler), timeout_s=0.3, absence=absence).play(PROMPT, 0)
    )
    await asyncio.sleep(0.4)
    began = loop.time()
    absence.come_back()
    await asyncio.sleep(0.2)
    absence.leave()
    await asyncio.sleep(0.4)
    assert not group.done()
    absence.come_back()
    outcome = await asyncio.wait_for(group, MINUTE)
    assert endings(outcome) == [Ending.COMPLETED, Ending.TRUNCATED]
    assert 0.69 < loop.time() - began < 5.0


async def test_an_episode_that_fails_in_the_engines_absence_is_played_again():
    worlds, absence = [], Waits()

    async def fail_late():
        await asyncio.sleep(0.2)
        raise RuntimeError("no world")

    def failing_once():
        worlds.append(two_turns() if worlds else Talk({"reset": fail_late}))
        return worlds[-1]

    absence.leave()
    agents = [speaker() for _ in range(3)]
    outcome = await player(*agents, env=failing_once, timeout_s=0.05, absence=absence).play(PROMPT, 0)
    assert len(outcome.failed) == 1
    assert endings(outcome) == [Ending.COMPLETED] * 2
