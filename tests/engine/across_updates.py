"""Conversations during which a trainer publishes, and the trainer's own logprobs at every token's version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.weights import token_mean
from agentrl.losses import PolicyLoss
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch import TorchTrainer
from agentrl.types import NO_VERSION, Author, Completion, Credit, RolloutId, Sample, Scores, TrainBatch
from agentrl.types.seams import Engine, Sampling
from tests.engine.fleets import until
from tests.engine.subjects import VOCAB, tiny

MIDDLE, BETWEEN = "in the middle of a turn", "between two turns"
PLAN = (MIDDLE, BETWEEN, BETWEEN, MIDDLE, MIDDLE)
"""When the weights change: of each turn."""


class Training:
    """A trainer over `tiny("qwen3")` that updates, publishes, and remembers the weights of every version."""

    def __init__(self, engine: Engine) -> None:
        self.model, self.engine, self.version = tiny("qwen3"), engine, 0
        config = TrainerConfig(lr=1e-2, lr_warmup_iters=0, max_tokens_per_gpu=4096)
        tokenizer = train_tokenizer(["abc"], special_tokens=(), vocab_size=300)
        self.trainer = TorchTrainer(
            self.model,
            PolicyLoss(eps_clip=0.2, eps_clip_high=0.2),
            config,
            tokenizer=tokenizer,
            total_steps=99,
        )
        self._weights: dict[int, dict[str, Tensor]] = {0: self._copy()}

    async def train(self, samples: Sequence[Sample]) -> None:
        """One optimizer step on some samples."""
        rng = np.random.default_rng(self.version)
        advantages = tuple(rng.normal(size=len(sample)).astype(np.float32) for sample in samples)
        credit = Credit(advantages, token_mean(samples))
        old = Scores(tuple(sample.logprobs for sample in samples))
        await self.trainer.update(TrainBatch(tuple(samples), old, credit))

    async def publish(self) -> None:
        """Publish the weights as the next version."""
        self.version += 1
        self._weights[self.version] = self._copy()
        await self.trainer.publish(self.engine.sink, version=self.version)

    async def worst_difference(self, samples: Sequence[Sample]) -> float:
        """The greatest difference of a token's logprob from the trainer's at the token's version (nats)."""
        worst = 0.0
        for version, weights in self._weights.items():
            self.model.load_state_dict(weights)
            scores = await self.trainer.score(samples)
            for sample, logprobs in zip(samples, scores.proximal, strict=True):
                tokens = sample.versions == version
                worst = max(worst, float(np.abs(logprobs - sample.logprobs)[tokens].max(initial=0.0)))
        return worst

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


class Conversation:
    """Turns of one session: what was sampled, and three tokens of the world after each turn."""

    def __init__(self, number: int) -> None:
        self.number, self.session, self._rng = number, f"c{number}", np.random.default_rng(number)
        self.ids: list[int] = self._world(7)
        self._turns: list[tuple[int, Completion]] = []

    async def turn(self, engine: Engine, num_tokens: int) -> None:
        """Sample exactly that many tokens."""
        rule = Sampling(num_tokens, seed=len(self.ids))
        completion = await engine.generate(self.ids, rule, session=self.session)
        assert len(completion.token_ids) == num_tokens, "the budget of a turn is what was asked for"
        self._turns.append((len(self.ids), completion))
        self.ids += [*completion.token_ids.tolist(), *self._world(3)]

    @property
    def versions(self) -> list[list[int]]:
        """The versions of each turn's tokens."""
        return [completion.versions.tolist() for _, completion in self._turns]

    def sample(self) -> Sample:
        """The conversation as a sample."""
        size = len(self.ids)
        author = np.full(size, Author.WORLD, np.int8)
        logprobs, versions = np.zeros(size, np.float32), np.full(size, NO_VERSION, np.int32)
        for start, completion in self._turns:
            end = start + len(completion.token_ids)
            author[start:end] = Author.POLICY
            logprobs[start:end], versions[start:end] = completion.logprobs, completion.versions
        return Sample(
            np.asarray(self.ids, np.int32),
            author,
            author == Author.POLICY,
            logprobs,
            versions,
            np.zeros(size, np.int32),
            np.ones(size, np.float32),
            RolloutId(self.session, "agent"),
        )

    def _world(self, count: int) -> list[int]:
        return self._rng.integers(0, VOCAB, count).tolist()


async def first_turn_ended(conversations: Sequence[Conversation]) -> None:
    """Wait until one of them has one turn more than now."""
    before = [len(conversation.versions) for conversation in conversations]
    await until(lambda: before != [len(conversation.versions) for conversation in conversations])


async def play_across_updates(engine: Engine, turn_tokens: int, *, sessions: int = 12) -> None:
    """Play conversations while the weights change, and compare every logprob with the trainer's.

    There are more of them than the engine has slots, their turns have several lengths, and whoever has ended
    while an update comes begins another conversation: however long it takes, some turns are under way.
    """
    training = Training(engine)
    conversations = [Conversation(number) for number in range(sessions)]
    more: list[Conversation] = []

    async def play(conversation: Conversation, published: asyncio.Event) -> None:
        size = turn_tokens - turn_tokens // 5 * (conversation.number % 4)
        await conversation.turn(engine, size)
        while not published.is_set():
            more.append(Conversation(sessions + len(more)))
            await more[-1].turn(engine, size)

    await asyncio.gather(*(conversation.turn(engine, 4) for conversation in conversations))
    for moment in PLAN:
        await training.train([conversation.sample() for conversation in conversations])
        published = asyncio.Event()
        if moment == BETWEEN:
            await training.publish()
            published.set()
        playing = [asyncio.create_task(play(conversation, published)) for conversation in conversations]
        if moment == MIDDLE:
            await first_turn_ended(conversations)
            await training.publish()
            published.set()
        await asyncio.gather(*playing)
        # Every version samples some tokens, also where all turns ended while it was on its way.
        await asyncio.gather(*(conversation.turn(engine, 4) for conversation in conversations))
    conversations += more
    turns = [turn for conversation in conversations for turn in conversation.versions]
    assert sum(len(set(turn)) > 1 for turn in turns) >= 2, "updates reached requests in flight"
    assert all(turn == sorted(turn) for turn in turns)
    assert {version for turn in turns for version in turn} == set(range(training.version + 1))
    with torch.no_grad():
        worst = await training.worst_difference([conversation.sample() for conversation in conversations])
    print(f"the greatest difference of a logprob from the trainer's: {worst:.1e}")
    assert worst <= 1e-4
