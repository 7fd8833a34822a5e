"""Requests of any client become trajectories: each sampled token is trained once, after those it followed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agentrl.algorithms.laws import TokenLaws
from agentrl.algorithms.samples import samples_of
from agentrl.envs.gateway.recording import EpisodeRecording, ModelRequest
from agentrl.envs.generate import EpisodeEndedError, generating
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Group, Message, Verdict
from tests.envs.gateway.clients import FORMS, Babbler, Client, words_of
from tests.worlds import ASK, QUICK, Talk


async def played(form, seed, num_requests=20, ask=None):
    """An episode whose client asks at random, and the client."""
    words, clients = words_of(form), []

    async def asks(episode):
        await episode.reset()
        recording = EpisodeRecording(episode, Counter())
        client = Client(recording, policy, words, random.Random(seed))
        clients.append(client)
        await (ask or Client.run)(client, num_requests)
        recording.keep()
        episode.finish(1.0)

    policy = Babbler(words, random.Random(seed + 1))
    env = Talk()
    env.limits = replace(QUICK, max_turns=200, max_tokens=4000)
    agent = TokenAgent(policy, words, SamplingSettings(), words.bounded)
    episode = await generating(asks)(env, agent, ASK, episode_id="e")
    assert episode.failure is None, episode.failure
    return episode, clients[0]


def trained_in(samples):
    """Every trained token with all tokens before it, and its logprob."""
    found = Counter()
    for sample in samples:
        ids = sample.token_ids.tolist()
        for place in np.flatnonzero(sample.loss_mask).tolist():
            found[tuple(ids[:place]), ids[place], float(sample.logprobs[place])] += 1
    return found


def sampled_by(policy):
    """The same as the policy has sampled it."""
    found = Counter()
    for prompt, ids in policy.asked:
        logprobs = -np.linspace(0.1, 1.0, len(ids), dtype=np.float32)
        for place, token in enumerate(ids):
            found[prompt + ids[:place], token, float(logprobs[place])] += 1
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(6))
async def test_every_sampled_token_is_trained_once_after_the_tokens_it_followed(form, seed):
    episode, client = await played(form, seed)
    samples = samples_of(episode)
    assert not client.policy.sessions, "each is closed with the episode"
    assert trained_in(samples) == sampled_by(client.policy)
    verdict = Verdict(episode.id, "x", 1.0, turn_rewards=(*(None for _ in episode.turns[1:]), 1.0))
    groups = [Group("g", ASK, 0, (episode,), (verdict,))]
    laws = TokenLaws(vocab_size=len(client.words.tokenizer))
    laws.check_episodes(groups, version=3)
    laws.check_samples(groups, samples)
    assert [reward for reward in episode.rewards_of() if reward is not None] == [1.0]


async def asked_late(client, num_requests):
    """A client that asks when the time of its group is over: no reply has a token any more."""
    await client.run(3)
    num_sampled = len(client.policy.asked)
    client.policy.is_late = True
    for _ in range(2):
        with pytest.raises(EpisodeEndedError, match="the time of the episode is over"):
            await client.recording.answers(ModelRequest((Message("user", "more"),), (), n=2))
    assert client.recording.was_cut
    assert len(client.policy.asked) == num_sampled


async def test_a_reply_that_the_deadline_leaves_no_token_ends_the_episode_and_is_in_no_sample():
    episode, client = await played(next(iter(FORMS)), 0, ask=asked_late)
    samples = samples_of(episode)
    assert trained_in(samples) == sampled_by(client.policy)
    assert all(sample.loss_mask.any() for sample in samples)
