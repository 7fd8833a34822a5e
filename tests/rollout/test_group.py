"""Siblings share task and seed; failed episodes are replaced, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from agentrl import GroupReward, Reward, UserError, play, say
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.rollout.group import GroupOutcome, GroupPlayer, all_of
from agentrl.tools import inline
from agentrl.types import Ending, Finish, Step
from tests.worlds import ASK, Hang, Speaker, Talk, raising, turn_tokens

PROMPT = Prompt(7, ASK, 1234)


class Recorded(Talk):
    """Records the task and seed of its reset; its reward comes from its own random generator."""

    async def reset(self, task, *, seed):
        # All siblings are created before the first of them fails: instance n is sibling n.
        await asyncio.sleep(0)
        observation = await super().reset(task, seed=seed)
        self.reset_with = (task, seed)
        self.answers = [Step.finished(reward=self.rng.random())]
        return observation


class Setting:
    """A group player over environments whose n-th instance fails, for n in `failing`."""

    def __init__(self, size, *, failing=(), retries=2, seed=0, aborting=(), rewards=(), **options):
        self.envs, self.agents = [], []
        self.failing, self.aborting = set(failing), set(aborting)
        self.player = GroupPlayer(self.env, self.agent, Scorer(rewards), size, retries, seed, **options)

    def env(self):
        number = len(self.envs)
        broken = {"reset": raising(RuntimeError(f"world {number}"))} if number in self.failing else None
        self.envs.append(Recorded(broken))
        return self.envs[-1]

    def agent(self):
        aborted = [turn_tokens(1, 1, Finish.ABORT)] if len(self.agents) in self.aborting else []
        self.agents.append(Speaker(say("x"), tokens=aborted))
        return self.agents[-1]

    async def play(self, version=3):
        return await self.player.play(PROMPT, version)


async def test_siblings_share_task_and_world_and_sample_apart():
    setting = Setting(4)
    outcome = await setting.play()
    assert {env.reset_with[1] for env in setting.envs} == {1234}
    assert all(env.reset_with[0] is ASK for env in setting.envs)
    rewards = {verdict.total for verdict in outcome.group.verdicts}
    assert len(rewards) == 1
    assert len({agent.sessions[0].seed for agent in setting.agents}) == 4
    assert len({agent.sessions[0].id for agent in setting.agents}) == 4


async def test_one_more_sibling_takes_the_likeliest_tokens():
    greedy = []

    def make_greedy():
        greedy.append(Speaker(say("x")))
        return greedy[-1]

    setting = Setting(2, make_greedy_agent=make_greedy)
    outcome = await setting.play()
    assert [e.id for e in outcome.group.episodes] == ["g7-0", "g7-1", "g7-2"]
    assert (len(setting.agents), len(greedy)) == (2, 1)
    assert greedy[0].sessions[0].id == "g7-2"
    broken = Setting(1, make_greedy_agent=make_greedy, failing=[1], retries=0)
    assert (await broken.play()).group is None, "a group without its baseline is lost"


async def test_a_complete_group_has_its_version_and_its_prompt():
    outcome = await Setting(2).play(version=5)
    group = outcome.group
    assert (group.id, group.task, group.seed, group.start_version) == ("g7", ASK, 1234, 5)
    assert [e.id for e in group.episodes] == [v.episode_id for v in group.verdicts] == ["g7-0", "g7-1"]
    assert outcome.failed == ()
    assert outcome.episodes == group.episodes


async def test_a_group_has_the_version_at_its_end_where_that_is_another():
    outcome = await Setting(2).play(version=5)
    assert outcome.ended(5) is outcome
    assert outcome.ended(7).group.end_version == 7
    assert outcome.ended(7).group.start_version == 5
    broken = GroupOutcome(None, (), ())
    assert broken.ended(7) is broken


async def test_sampling_seeds_depend_only_on_the_runs_seed():
    async def seeds(seed):
        setting = Setting(3, seed=seed)
        await setting.play()
        return {agent.sessions[0].seed for agent in setting.agents}

    assert await seeds(0) == await seeds(0)
    assert not await seeds(0) & await seeds(1)


async def test_a_failed_episode_is_played_again_in_the_same_world_with_other_samples():
    setting = Setting(3, failing={1})
    outcome = await setting.play()
    assert len(setting.envs) == 4
    assert setting.envs[3].reset_with == (ASK, 1234)
    assert {e.ending for e in outcome.group.episodes} == {Ending.COMPLETED}
    assert [e.id for e in outcome.group.episodes] == ["g7-0", "g7-1-retry1", "g7-2"]
    assert [e.id for e in outcome.failed] == ["g7-1"]
    assert outcome.failed[0].failure.detail.startswith("RuntimeError: world 1 (")


async def test_an_episode_whose_reward_breaks_is_played_again_and_no_other_is_measured_twice():
    measured = []

    @inline
    def broken_once(episode):
        measured.append(episode.id)
        return 1 / (episode.id != "g7-1")

    setting = Setting(3, rewards=[Reward(broken_once)])
    outcome = await setting.play()
    assert [e.id for e in outcome.group.episodes] == ["g7-0", "g7-1-retry1", "g7-2"]
    assert sorted(measured) == ["g7-0", "g7-1", "g7-1-retry1", "g7-2"]
    assert [e.failure.name for e in outcome.failed] == ["reward_error"]
    assert setting.envs[3].reset_with == (ASK, 1234)
    for episode, verdict in zip(outcome.group.episodes, outcome.group.verdicts, strict=True):
        assert verdict.parts == {"env": episode.step_rewards[0], "broken_once": 1.0}


async def test_a_group_whose_group_reward_fails_is_lost():
    setting = Setting(3, failing={1}, rewards=[GroupReward(lambda siblings: [1.0], name="rank")])
    outcome = await setting.play()
    assert outcome.group is None
    assert outcome.finished == ()
    assert sorted(e.id for e in outcome.failed) == ["g7-0", "g7-1", "g7-1-retry1", "g7-2"]
    assert {e.failure.name for e in outcome.failed} == {"reset_error", "reward_invalid"}


async def test_a_reward_over_siblings_sees_those_that_replaced_the_failed_ones():
    ranked = []

    @inline
    def rank(siblings):
        ranked.append([e.id for e in siblings])
        return range(len(siblings))

    outcome = await Setting(3, failing={0}, rewards=[GroupReward(rank)]).play()
    assert ranked == [["g7-0-retry1", "g7-1", "g7-2"]]
    assert [v.parts["rank"] for v in outcome.group.verdicts] == [0.0, 1.0, 2.0]


async def test_an_aborted_episode_is_played_again_too():
    outcome = await Setting(2, aborting={0}).play()
    assert [e.ending for e in outcome.failed] == [Ending.ABORTED]
    assert len(outcome.group.episodes) == 2


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_group_breaks_after_so_many_retries_and_keeps_every_episode_once(retries):
    setting = Setting(3, failing={1, 3, 4, 5}, retries=retries)
    outcome = await setting.play()
    ids = [episode.id for episode in outcome.episodes]
    assert len(ids) == len(set(ids)) == len(setting.envs) == 3 + retries
    assert outcome.group is None
    assert len(outcome.failed) == 1 + retries
    assert [e.id for e in outcome.finished] == ["g7-0", "g7-2"]


@pytest.mark.parametrize("retries", [2, 3])
async def test_a_group_is_complete_when_the_last_retry_succeeds(retries):
    setting = Setting(2, failing={0, 2}, retries=retries)
    outcome = await setting.play()
    assert outcome.group is not None
    assert len(outcome.failed) == 2
    assert len(outcome.episodes) == len(setting.envs) == 4


async def test_every_world_and_agent_is_closed_whatever_happened():
    setting = Setting(4, failing={0, 1, 4})
    await setting.play()
    assert [env.closed for env in setting.envs] == [1] * len(setting.envs)
    assert [len(agent.closed) for agent in setting.agents] == [1] * len(setting.agents)


async def test_cancelling_a_group_closes_every_sibling_and_plays_nothing_again():
    hang, setting = Hang(), Setting(3)
    make = setting.env

    def hanging():
        env = make()
        env.on = {"step": hang}
        return env

    player = GroupPlayer(hanging, setting.agent, Scorer(), 3, 2, 0)
    task = asyncio.create_task(player.play(PROMPT, 0))
    await hang.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [env.closed for env in setting.envs] == [1, 1, 1]


async def test_an_error_of_the_user_ends_the_group_and_closes_the_siblings():
    setting, hang = Setting(3), Hang()
    make = setting.env

    def last_broken():
        env = make()
        last = len(setting.envs) == 3
        env.on = {"reset": raising(UserError("set the key"))} if last else {"reset": hang}
        return env

    player = GroupPlayer(last_broken, setting.agent, Scorer(), 3, 2, 0)
    with pytest.raises(UserError, match="set the key"):
        await player.play(PROMPT, 0)
    assert hang.released
    assert [env.closed for env in setting.envs] == [1, 1, 1]


async def test_shuffled_rewards_are_a_permutation_of_the_rewards():
    class Numbered(Setting):
        def env(self):
            env = super().env()
            env.reset_number = len(self.envs)
            inner = env.reset

            async def reset(task, *, seed):
                observation = await inner(task, seed=seed)
                env.answers = [Step.finished(reward=float(env.reset_number))]
                return observation

            env.reset = reset
            return env

    true = await Numbered(8).play()
    shuffled = await Numbered(8, shuffle_rewards=True).play()
    again = await Numbered(8, shuffle_rewards=True).play()
    totals = [verdict.total for verdict in true.group.verdicts]
    shuffled_totals = [verdict.total for verdict in shuffled.group.verdicts]
    assert shuffled_totals != totals
    assert sorted(shuffled_totals) == sorted(totals)
    assert [verdict.total for verdict in again.group.verdicts] == shuffled_totals
    assert {verdict.scorer for verdict in shuffled.group.verdicts} == {"env, shuffled"}


async def test_all_of_returns_in_order_and_raises_the_first_error_after_cleaning_up():
    async def after(ticks, value):
        for _ in range(ticks):
            await asyncio.sleep(0)
        return value

    assert await all_of([after(3, "a"), after(1, "b"), after(2, "c")]) == ["a", "b", "c"]
    hang = Hang()
    with pytest.raises(KeyError):
        await all_of([hang(), raising(KeyError("x"))()])
    assert hang.released


async def test_a_cancelled_group_has_each_of_its_episodes_once():
    """Sibling 0 has ended, 1 failed and is in play again, 2 never ended."""
    hang, setting = Hang(), Setting(3, failing={1})
    make = setting.env

    def env():
        world = make()
        if len(setting.envs) in (3, 4):
            world.on = {"step": hang}
        return world

    player = GroupPlayer(env, setting.agent, Scorer(), 3, 2, 0)
    task = asyncio.create_task(player.play(PROMPT, 0))
    while len(setting.envs) < 4 or not hang.entered.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    outcome = player.cancelled(PROMPT)
    assert outcome.group is None
    assert [(e.id, e.ending) for e in outcome.finished] == [
        ("g7-0", Ending.COMPLETED),
        ("g7-1-retry1", Ending.ABORTED),
        ("g7-2", Ending.ABORTED),
    ]
    assert [(e.id, e.ending) for e in outcome.failed] == [("g7-1", Ending.FAILED)]
    assert outcome.finished[1].seed == PROMPT.seed
    assert outcome.finished[1].task is ASK


async def test_a_group_that_was_cancelled_before_it_began_is_aborted():
    outcome = Setting(2).player.cancelled(PROMPT)
    assert [(e.id, e.ending) for e in outcome.episodes] == [
        ("g7-0", Ending.ABORTED),
        ("g7-1", Ending.ABORTED),
    ]


async def test_episodes_are_played_by_the_function_of_the_run():
    played = []

    async def counted(env, agents, task, **options):
        played.append(options["episode_id"])
        return await play(env, agents, task, **options)

    await Setting(2, play_episode=counted).play()
    assert sorted(played) == ["g7-0", "g7-1"]
