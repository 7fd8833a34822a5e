"""Hundreds of episodes on the embedded engine: samples have exactly the tokens that it has sampled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict

import httpx2
import numpy as np
import pytest

from agentrl import play
from agentrl.algorithms.samples import samples_of
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Restart
from tests.engine.subjects import tiny
from tests.envs.gateway.worlds import ASK, TOOL, WORDS, Asking

NUM_EPISODES, AT_ONCE = 200, 10


class Logged:
    """The engine, and what it has sampled: by episode, each token after all that stood before it.

    A request beside another one of its episode has a session of its own.
    """

    def __init__(self, engine):
        self.engine = engine
        self.sampled = defaultdict(Counter)

    @property
    def version(self):
        return self.engine.version

    async def generate(self, prompt_ids, sampling, *, session):
        completion = await self.engine.generate(prompt_ids, sampling, session=session)
        ids = completion.token_ids.tolist()
        for place, token in enumerate(ids):
            before = (*prompt_ids, *ids[:place])
            self.sampled[session.partition("#")[0]][before, token, float(completion.logprobs[place])] += 1
        return completion

    async def close_session(self, session):
        await self.engine.close_session(session)


async def wanders(url, key, task, rng):
    """A conversation that goes on, branches, asks in parallel, and is compacted."""
    tools, messages = [TOOL], [{"role": "system", "content": "Go."}, {"role": "user", "content": "Where?"}]
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=100) as client:

        async def ask(messages, n=1):
            body = {
                "model": "m",
                "messages": messages,
                "tools": tools,
                "n": n,
                "max_tokens": rng.randint(1, 6),
            }
            reply = await client.post(f"{url}/chat/completions", json=body)
            reply.raise_for_status()
            return [choice["message"] for choice in reply.json()["choices"]]

        for _ in range(rng.randint(2, 4)):
            kind = rng.choice(("on", "on", "parallel", "several", "compacted"))
            if kind == "compacted":
                messages = [*messages[:2], {"role": "user", "content": f"Before: {rng.random()}"}]
            if kind == "parallel":
                more = [{"role": "user", "content": word} for word in ("Left?", "Right?")]
                replies = await asyncio.gather(*(ask([*messages, one]) for one in more))
                messages = [*messages, more[0], replies[0][0]]
            else:
                said = (await ask(messages, n=2 if kind == "several" else 1))[-1]
                if rng.random() < 0.5 and isinstance(said["content"], str):
                    said = {**said, "content": f"{said['content'].strip()} "}
                messages = [*messages, said]
            messages = [*messages, {"role": "user", "content": rng.choice(("And?", "Sure?"))}]
    return "5"


@pytest.mark.full
async def test_every_token_of_two_hundred_episodes_is_that_of_the_engine():
    model = tiny("qwen3", vocab_size=len(WORDS.tokenizer), max_position_embeddings=1024)
    policy = Logged(EmbeddedEngine.from_model(model, max_slots=16, max_context_len=1000))
    reasons, room = Counter(), asyncio.Semaphore(AT_ONCE)

    async def played(number):
        rng = random.Random(number)
        env = Asking(lambda *door: wanders(*door, rng), limits={"max_turns": 20, "max_tokens": 1000})
        async with room:
            agent = TokenAgent(policy, WORDS, SamplingSettings(), WORDS.bounded)
            episode = await play(env, agent, ASK, episode_id=f"e{number}", sampling_seed=number)
        assert episode.failure is None, episode.failure
        trained = Counter()
        for sample in samples_of(episode):
            ids = sample.token_ids.tolist()
            for place in np.flatnonzero(sample.loss_mask).tolist():
                trained[tuple(ids[:place]), ids[place], float(sample.logprobs[place])] += 1
        assert trained == policy.sampled.pop(episode.id)
        reasons.update(trajectory.reason for trajectory in episode.trajectories)
        reasons["continued"] += sum(len(own.turns) - 1 for own in episode.trajectories)
        reasons.update(name for name in episode.counts if name.startswith("changed_"))

    await asyncio.gather(*map(played, range(NUM_EPISODES)))
    assert not policy.engine.scheduler.pending()
    await policy.engine.close()
    assert reasons[Restart.PARALLEL] > 50
    assert reasons[Restart.COMPACTED] > 20
    assert reasons["continued"] > 100
    assert reasons["changed_white_space"] > 10
