"""Functions that write their prompts token by token: what is trained is what was sampled, in its place."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random

import numpy as np
import pytest

from agentrl import Message, ScriptedAgent, Step, UserError, play, say
from agentrl.algorithms.laws import TokenLaws
from agentrl.algorithms.samples import samples_of
from agentrl.envs.contract import check_generate
from agentrl.envs.generate import EpisodeEndedError, generating
from agentrl.envs.own_tokens import NeedsTokensError
from agentrl.rollout.agent import SamplingSettings, TokenAgent, with_deadline
from agentrl.runtime.clocks import SharedDeadline
from agentrl.types import KEPT_IDS, Ending, Extra, Finish, Group, Restart, RewardParts, Verdict
from tests.rollout.test_agent import Letters
from tests.worlds import ASK as TASK
from tests.worlds import QUICK, Hang, Reciter, Speaker, Talk

PROMPT = [1, *map(ord, "How many?")]


def world(max_tokens=200, **more):
    env = Talk(**more)
    env.limits = dataclasses.replace(QUICK, max_tokens=max_tokens)
    return env


def agent_of(line, settings=None, version=3):
    policy = Reciter(line, version=version)
    return TokenAgent(policy, Letters(), settings or SamplingSettings()), policy


async def played(generate, line=lambda turn, sampling: [50 + turn, 60 + turn, 70 + turn], **more):
    agent, policy = agent_of(line, more.pop("settings", None))
    return await generating(generate)(more.pop("env", None) or world(), agent, TASK, seed=5, **more), policy


async def two_turns(episode):
    """The end of the first turn is dropped, and a tool writes 9."""
    prompt = await episode.tokens.render(await episode.reset())
    first = await episode.tokens.sample(prompt)
    ids = [*prompt, *first.token_ids[:2].tolist(), 9]
    second = await episode.tokens.sample(ids)
    ids += second.token_ids.tolist()
    flags = [False] * len(prompt) + [True, True, False, True, True, True]
    episode.keep([*ids, 8, 8], [*flags, False, False])
    episode.finish(RewardParts({"right": 0.5, "short": 0.25}, total=0.75))


async def test_what_was_sampled_is_trained_in_its_place_and_nothing_else():
    episode, policy = await played(two_turns)
    (sample,) = samples_of(episode)
    assert sample.token_ids.tolist() == [*PROMPT, 50, 60, 9, 51, 61, 71]
    assert sample.token_ids[sample.loss_mask].tolist() == [50, 60, 51, 61, 71]
    # The logprobs are those of the first two, and of all three (see `worlds.completion`).
    all_three = -np.linspace(0.1, 1.0, 3, dtype=np.float32)
    assert sample.logprobs[sample.loss_mask].tolist() == [*all_three[:2], *all_three]
    assert set(sample.versions[sample.loss_mask].tolist()) == {3}
    assert policy.prompts == [PROMPT, [*PROMPT, 50, 60, 9]]
    assert [turn.action.text for turn in episode.turns] == ["2<", "3=G"]
    assert episode.rewards_of() == (None, 0.75)
    assert episode.total_of().parts == {"right": 0.5, "short": 0.25}
    assert episode.ending is Ending.COMPLETED
    verdict = Verdict(episode.id, "x", 0.75, turn_rewards=(None, 0.75))
    groups = [Group("g", TASK, 5, (episode,), (verdict,))]
    TokenLaws(vocab_size=200).check_episodes(groups, version=3)
    TokenLaws(vocab_size=200).check_samples(groups, [sample])


async def test_agents_of_a_function_have_rewards_of_their_own():
    async def plays(episode):
        prompt = await episode.tokens.render(await episode.reset())
        for agent in (None, "critic", "critic"):
            ids = [*prompt, 40 if agent else 41]
            reply = (await episode.tokens.sample(ids)).token_ids.tolist()
            flags = [False] * len(ids) + [True] * len(reply)
            episode.keep([*ids, *reply], flags, agent=agent)
        episode.finish({"critic": 2, "agent": 0.5})

    episode, _ = await played(plays)
    assert (episode.agents, episode.total_of("agent"), episode.total_of("critic")) == (
        *(("agent", "critic"), 0.5, 2.0),
    )
    assert [(t.agent, t.parent, [turn.step for turn in t.turns]) for t in episode.trajectories] == [
        *(("agent", None, [0]), ("critic", None, [1]), ("critic", 1, [2])),
    ]
    assert episode.rewards_of("critic") == (None, 2.0)
    totals = zip(episode.agents, (0.5, 2.0), strict=True)
    verdicts = tuple(Verdict(episode.id, "x", total, agent=agent) for agent, total in totals)
    groups = [Group("g", TASK, 5, (episode,), verdicts)]
    TokenLaws(vocab_size=200).check_samples(groups, samples_of(episode))


async def test_its_requests_are_sampled_as_the_turns_of_an_agent():
    settings = SamplingSettings(temperature=0.7, top_p=0.9, top_k=4, max_response_len=3, return_kept_ids=True)
    _, own = await played(two_turns, settings=settings, sampling_seed=11)
    agent, native = agent_of(lambda turn, sampling: [50, 60, 70], settings)
    await play(world(), agent, TASK, seed=5, sampling_seed=11)
    assert own.samplings == native.samplings[:2]
    assert own.samplings[0] != own.samplings[1]  # The seed is that of the turn.
    assert (own.sessions[0], own.closed) == (native.sessions[0], native.closed)


async def test_a_request_adds_stops_and_lowers_lengths():
    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        await episode.tokens.sample(prompt, max_new_tokens=2, stop=["</x>", "</y>"], stop_token_ids=[9, 4])
        await episode.tokens.sample(prompt, max_new_tokens=500)
        episode.keep(prompt, [False] * len(prompt))
        episode.finish(0.0)

    episode, policy = await played(asks, env=world(max_tokens=30))
    first, second = policy.samplings
    assert (first.max_new_tokens, first.stop, first.stop_token_ids) == (2, ("</x>", "</y>"), (7, 9, 4))
    assert (second.max_new_tokens, second.stop, second.stop_token_ids) == (20, ("</x>",), (7, 9))
    # A trajectory of which nothing is trained is one turn without a token.
    assert [len(turn.tokens.completion.token_ids) for turn in episode.turns] == [0]
    assert not any(sample.loss_mask.any() for sample in samples_of(episode))


async def test_where_the_limit_leaves_no_token_nothing_is_sampled():
    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        first = await episode.tokens.sample(prompt)
        whole = [*prompt, *first.token_ids.tolist()]
        last = await episode.tokens.sample(whole)
        assert (len(last.token_ids), last.finish) == (0, Finish.LENGTH)
        episode.keep(whole, [token >= 50 and place >= len(prompt) for place, token in enumerate(whole)])
        episode.finish(0.0, truncated=True)

    episode, policy = await played(asks, env=world(max_tokens=len(PROMPT) + 2))
    assert [len(prompt) for prompt in policy.prompts] == [len(PROMPT)]
    assert (episode.ending, episode.rewards_of()) == (Ending.TRUNCATED, (0.0,))


async def rewrites(episode):
    prompt = await episode.tokens.render(await episode.reset())
    completion = await episode.tokens.sample(prompt)
    ids = [*prompt, completion.token_ids[0], 66, completion.token_ids[2]]
    episode.keep(ids, [False] * len(prompt) + [True] * 3)


async def moves(episode):
    prompt = await episode.tokens.render(await episode.reset())
    completion = await episode.tokens.sample(prompt)
    ids = [*prompt, 9, *completion.token_ids]
    episode.keep(ids, [False] * len(prompt) + [False, True, True, True])


async def counts_wrong(episode):
    prompt = await episode.tokens.render(await episode.reset())
    episode.keep(prompt, [False])


async def asks_for_ever(episode):
    prompt = await episode.tokens.render(await episode.reset())
    while True:
        await episode.tokens.sample(prompt)


async def asks_without_a_prompt(episode):
    await episode.reset()
    await episode.tokens.sample([])


async def pays_nan(episode):
    prompt = await episode.tokens.render(await episode.reset())
    episode.keep(prompt, [False] * len(prompt))
    episode.finish(float("nan"))


def keeps(agent=None, reward=1.0):
    async def plays(episode):
        prompt = await episode.tokens.render(await episode.reset())
        episode.keep(prompt, [False] * len(prompt), agent=agent)
        episode.finish(reward)

    return plays


async def pays_nobody(episode):
    await episode.reset()
    episode.finish(1.0)


@pytest.mark.parametrize(
    ("generate", "stage", "detail"),
    [
        (rewrites, "generate", "token 11 ('B') is to be trained, and the policy did not sample it after"),
        (moves, "generate", "token 11 ('2') is to be trained, and the policy did not sample it after"),
        (counts_wrong, "generate", "keep() needs as many flags as tokens, got (10,) and (1,)"),
        (asks_for_ever, "generate", "sample() needs a prompt, and answers 1000 in an episode"),
        (asks_without_a_prompt, "generate", "sample() needs a prompt"),
        (pays_nan, "reward", "the reward must be a finite number, got nan"),
        (keeps("critic", {"critic": math.inf}), "reward", "the reward must be a finite number, got inf"),
        (keeps("critic", {"judge": 1.0}), "reward", "there is no agent 'judge' to reward"),
        (keeps("a b"), "generate", "an agent cannot be called 'a b'"),
        (pays_nobody, "generate", "finish() needs a turn before it; call act() or keep()"),
    ],
)
async def test_what_was_not_sampled_fails_the_episode(generate, stage, detail):
    episode, _ = await played(generate)
    assert (episode.ending, episode.failure.stage) == (Ending.FAILED, stage)
    assert episode.failure.detail.startswith(detail)


async def test_a_token_is_trained_once_however_many_trajectories_hold_it():
    async def forks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        first = [*prompt, *(await episode.tokens.sample(prompt)).token_ids.tolist()]
        flags = [False] * len(prompt) + [True] * 3
        for written in (8, 9):
            ids = [*first, written]
            ids += (await episode.tokens.sample(ids)).token_ids.tolist()
            episode.keep(ids, [*flags, False, True, True, True])
        episode.finish(1.0)

    episode, _ = await played(forks)
    one, other = samples_of(episode)
    assert one.token_ids[one.loss_mask].tolist() == [50, 60, 70, 51, 61, 71]
    assert other.token_ids.tolist() == [*PROMPT, 50, 60, 70, 9, 52, 62, 72]
    assert other.token_ids[other.loss_mask].tolist() == [52, 62, 72]
    assert [trajectory.reason for trajectory in episode.trajectories] == [None, Restart.REWRITTEN]
    assert episode.rewards_of() == (None, None, 1.0)


async def test_equal_completions_of_one_prompt_are_each_trained():
    async def twice(episode):
        prompt = await episode.tokens.render(await episode.reset())
        for _ in range(2):
            await episode.tokens.sample(prompt)
        for _ in range(2):
            episode.keep([*prompt, 5, 6], [False] * len(prompt) + [True, True])
        episode.finish(1.0)

    episode, _ = await played(twice, lambda turn, sampling: [5, 6])
    assert [sample.loss_mask.sum() for sample in samples_of(episode)] == [2, 2]


async def test_holes_in_what_is_trained_are_the_worlds_and_extras_keep_their_tokens():
    async def with_a_hole(episode):
        prompt = await episode.tokens.render(await episode.reset())
        completion = await episode.tokens.sample(prompt)
        episode.keep([*prompt, *completion.token_ids], [False] * len(prompt) + [True, False, True, True])
        episode.finish(1.0)

    class Keeping(Reciter):
        async def generate(self, prompt_ids, sampling, *, session):
            done = await super().generate(prompt_ids, sampling, session=session)
            kept = Extra.of_lists([np.array([token, 90 + token]) for token in done.token_ids])
            return dataclasses.replace(done, extras={KEPT_IDS: kept}, matched=7)

    agent = TokenAgent(Keeping(lambda turn, sampling: [5, 6, 3, 7]), Letters(), SamplingSettings())
    episode = await generating(with_a_hole)(world(), agent, TASK)
    (sample,) = samples_of(episode)
    assert sample.token_ids.tolist() == [*PROMPT, 5, 6, 3, 7]
    assert sample.token_ids[sample.loss_mask].tolist() == [5, 3, 7]
    kept = sample.extras[KEPT_IDS].lists()
    assert [ids.tolist() for ids in kept[len(PROMPT) :]] == [[5, 95], [], [3, 93], [7, 97]]
    ends = [(turn.tokens.completion.finish, turn.tokens.completion.matched) for turn in episode.turns]
    assert ends == [(Finish.STOP, None), (Finish.STOP, 7)]


def is_lawful(ids, flags, requests):
    """By looking at each trained token alone."""
    for place, flag in enumerate(flags):
        ways = (
            place >= len(prompt) and ids[: place + 1] == [*prompt, *sampled][: place + 1]
            for prompt, sampled in requests
        )
        if flag and not any(ways):
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
async def test_every_trained_token_is_one_that_was_sampled_there_whatever_the_function_does(seed):
    rng = random.Random(seed)
    seen: list[tuple[list[int], list[int]]] = []
    kept: list[tuple[list[int], list[bool]]] = []

    async def anything(episode):
        await episode.reset()
        prefixes = [[3]]
        for _ in range(rng.randrange(1, 6)):
            prompt = [*rng.choice(prefixes), *(rng.randrange(3, 5) for _ in range(rng.randrange(2)))]
            sampled = (await episode.tokens.sample(prompt)).token_ids.tolist()
            seen.append((prompt, sampled))
            prefixes += [prompt, prompt + sampled, prompt + sampled[:1]]
        ids = [*rng.choice(prefixes[1:]), *(rng.randrange(3, 5) for _ in range(rng.randrange(2)))]
        flags = [rng.random() < 0.6 for _ in ids]
        if rng.random() < 0.7:  # Most are lawful.
            flags = [
                f and is_lawful(ids, [n == place for n in range(len(ids))], seen)
                for place, f in enumerate(flags)
            ]
        kept.append((ids, flags))
        episode.keep(ids, flags)
        episode.finish(1.0)

    episode, _ = await played(anything, lambda turn, sampling: [rng.randrange(3, 5) for _ in range(3)])
    ((ids, flags),) = kept
    if not is_lawful(ids, flags, seen):
        assert "is to be trained, and the policy did not sample it" in episode.failure.detail
        return
    (sample,) = samples_of(episode)
    length = len(sample.token_ids)
    assert sample.token_ids.tolist() == ids[:length]
    assert sample.loss_mask.tolist() == flags[:length]
    assert not any(flags[length:])


async def test_a_run_that_ends_gives_the_episode_up():
    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        await episode.tokens.sample(prompt)
        episode.keep(prompt, [False] * len(prompt))
        episode.finish(1.0)

    agent, policy = agent_of(lambda turn, sampling: [5])
    await agent.stop("any")
    episode = await generating(asks)(world(), agent, TASK)
    assert (episode.ending, policy.prompts) == (Ending.ABORTED, [])


async def test_at_the_deadline_nothing_more_is_sampled():
    hang = Hang()

    class Slow(Reciter):
        async def generate(self, prompt_ids, sampling, *, session):
            await hang()

    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        completion = await episode.tokens.sample(prompt)
        assert (len(completion.token_ids), completion.finish) == (0, Finish.LENGTH)
        episode.keep(prompt, [False] * len(prompt))
        episode.finish(0.0, truncated=True)

    agent = TokenAgent(Slow(lambda turn, sampling: []), Letters(), SamplingSettings())
    episode = await generating(asks)(world(), with_deadline(agent, SharedDeadline(0.02)), TASK)
    assert (episode.ending, hang.released) == (Ending.TRUNCATED, True)


async def test_the_environment_may_pay_and_the_episode_goes_on():
    async def steps(episode):
        prompt = await episode.tokens.render(await episode.reset())
        completion = await episode.tokens.sample(prompt)
        ids = [*prompt, *completion.token_ids]
        episode.keep(ids, [place >= len(prompt) for place in range(len(ids))])
        await episode.step(say("3"))
        with pytest.raises(EpisodeEndedError):
            episode.finish(1.0)
        with pytest.raises(EpisodeEndedError):
            episode.keep(ids, [False] * len(ids))

    episode, _ = await played(steps, env=world(steps=[Step.finished(reward=0.25)]))
    assert (episode.ending, episode.rewards_of()) == (Ending.COMPLETED, (0.25,))


async def test_an_agent_without_tokens_is_a_sentence_and_the_check_goes_that_far():
    for agent in (Speaker(), ScriptedAgent(iter([say("3")]))):
        with pytest.raises(
            NeedsTokensError, match="a script or a chat endpoint has none; play it with a model"
        ):
            await generating(two_turns)(world(), agent, TASK)
    assert issubclass(NeedsTokensError, UserError)
    await check_generate(two_turns)

    async def fails_before(episode):
        await episode.reset()
        raise KeyError("x")

    with pytest.raises(ValueError, match="KeyError"):
        await check_generate(fails_before)


async def test_messages_and_tokens_of_ones_own_do_not_mix():
    async def mixes(episode):
        await two_turns(episode)

    async def acts_after(episode):
        prompt = await episode.tokens.render(await episode.reset())
        episode.keep(prompt, [False] * len(prompt))
        await episode.act(Message("user", "again"))

    async def keeps_after(episode):
        prompt = await episode.tokens.render(await episode.reset())
        await episode.act()
        episode.keep(prompt, [False] * len(prompt))

    assert (await played(mixes))[0].failure is None
    for generate in (acts_after, keeps_after):
        episode, _ = await played(generate)
        assert episode.failure.detail == "an episode is played by act(), or by keep(), not by both"


async def test_one_that_never_yields_lets_others_run():
    ticks = []

    async def ticking():
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        while True:
            await episode.tokens.sample(prompt)

    task = asyncio.create_task(ticking())
    await played(asks, env=world(max_tokens=len(PROMPT)))
    task.cancel()
    assert len(ticks) > 900


async def test_requests_at_once_have_seeds_of_their_own():
    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        await asyncio.gather(*(episode.tokens.sample(prompt) for _ in range(3)))
        episode.keep(prompt, [False] * len(prompt))
        episode.finish(0.0)

    _, policy = await played(asks)
    one_by_one = (await played(two_turns))[1].samplings
    seeds = [sampling.seed for sampling in policy.samplings]
    assert len(set(seeds)) == 3
    assert seeds[:2] == [sampling.seed for sampling in one_by_one]


async def test_a_branch_takes_nothing_from_the_trunk():
    """A request begins within another completion, and samples its next token again, then others."""

    class Newer(Reciter):
        async def generate(self, prompt_ids, sampling, *, session):
            self.version += 1
            return await super().generate(prompt_ids, sampling, session=session)

    lines = [[10, 11, 12, 13, 14], [12, 99]]

    async def branches(episode):
        prompt = await episode.tokens.render(await episode.reset())
        trunk = [*prompt, *(await episode.tokens.sample(prompt)).token_ids.tolist()]
        start = trunk[: len(prompt) + 2]
        branch = [*start, *(await episode.tokens.sample(start)).token_ids.tolist()]
        for ids in (trunk, branch):
            episode.keep(ids, [place >= len(prompt) for place in range(len(ids))])
        episode.finish(1.0)

    agent = TokenAgent(Newer(lambda turn, sampling: lines[turn]), Letters(), SamplingSettings())
    trunk, branch = samples_of(await generating(branches)(world(), agent, TASK))
    assert trunk.token_ids[trunk.loss_mask].tolist() == lines[0]
    assert set(trunk.versions[trunk.loss_mask].tolist()) == {1}
    # Its first tokens are the trunk's, which has trained them.
    assert branch.token_ids[branch.loss_mask].tolist() == lines[1]
    assert set(branch.versions[branch.loss_mask].tolist()) == {2}


@pytest.mark.parametrize("ends", ["step", "finish"])
async def test_an_answer_that_the_engine_gave_up_is_not_scored(ends):
    async def asks(episode):
        prompt = await episode.tokens.render(await episode.reset())
        await asyncio.gather(*(episode.tokens.sample(prompt) for _ in range(2)))
        episode.keep(prompt, [False] * len(prompt))
        if ends == "step":
            await episode.step(say("3"))
        episode.finish(1.0)

    class GivesUp(Reciter):
        async def generate(self, prompt_ids, sampling, *, session):
            is_first = not self.prompts
            done = await super().generate(prompt_ids, sampling, session=session)
            return dataclasses.replace(done, finish=Finish.ABORT) if is_first else done

    env = world()
    agent = TokenAgent(GivesUp(lambda turn, sampling: [5]), Letters(), SamplingSettings())
    episode = await generating(asks)(env, agent, TASK)
    assert (episode.ending, episode.step_rewards, env.actions) == (Ending.ABORTED, (), [])


async def test_a_trajectory_that_trains_nothing_is_no_longer_than_the_limit():
    async def keeps(episode):
        await episode.reset()
        episode.keep([5] * 1000, [False] * 1000)
        episode.finish(0.0)

    episode, _ = await played(keeps, env=world(max_tokens=30))
    assert len(episode.turns[0].tokens.world_ids) == 30
