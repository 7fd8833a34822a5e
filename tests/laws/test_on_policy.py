"""On-policy the trainer and the engine agree on every token, and both agree with transformers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl import Limits, Message, Task, call, play
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.weights import token_mean
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.losses import PolicyLoss
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch import TorchTrainer
from agentrl.types import NO_VERSION, Credit, Scores, TrainBatch
from agentrl.types.seams import Stops
from tests.laws.conversations import Oracle

VOCAB = 64
STOPS = tuple(range(10))
LIMITS = Limits(max_turns=6, max_tokens=90)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Wide enough that the distributions are far from uniform.
    "initializer_range": 0.25,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
}


class Bytes:
    """Every letter is a token; a turn ends with one of ten tokens."""

    def stops(self, tools):
        return Stops((), STOPS)

    def render(self, messages, tools):
        return [ord(letter) % VOCAB for message in messages for letter in message.content]

    def extend(self, history, observation, tools):
        return self.render(observation, ())

    def parse(self, ids, tools, *, prompt_ids=()):
        return call("echo", text=str(len(ids)))


def model_of(kind, seed=0):
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model


async def episodes(engine, temperature, *, count=8, seed=0):
    """Episodes of several turns, more of them at once than the engine has slots."""
    settings = SamplingSettings(temperature=temperature)

    def env(k):
        return Oracle([["x" * (1 + (k + turn) % 7)] for turn in range(4)], LIMITS)

    def task(k):
        return Task(f"t{k}", (Message("user", "abcdefgh"[: 1 + k % 8] * 2),))

    plays = [
        play(
            env(k), TokenAgent(engine, Bytes(), settings), task(k), episode_id=f"e{k}", sampling_seed=seed + k
        )
        for k in range(count)
    ]
    return await asyncio.gather(*plays)


def samples(played, temperature):
    """Their samples, which know what they were sampled at."""
    samples_ = [sample for episode in played for sample in samples_of(episode)]
    assert all(
        (sample_.temperatures[sample_.loss_mask] == np.float32(temperature)).all() for sample_ in samples_
    )
    return samples_


def reference(model, sample):
    """log p of every token given those before it, by transformers in float64."""
    wide = type(model)(model.config).double()
    wide.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    with torch.no_grad():
        logits = wide.eval()(ids).logits[0]
        # A token's temperature divides the logits that predict it.
        logits[:-1] /= torch.from_numpy(sample.temperatures[1:]).double()[:, None]
    logp = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], logp.numpy()])


def trainer_over(model, **changed):
    tokenizer = train_tokenizer(["abc"], special_tokens=(), vocab_size=300)
    config = TrainerConfig(lr=1e-2, lr_warmup_iters=0, max_tokens_per_gpu=64, **changed)
    loss = PolicyLoss(eps_clip=0.2, eps_clip_high=0.2)
    return TorchTrainer(model, loss, config, tokenizer=tokenizer, total_steps=10)


def engine_over(model):
    return EmbeddedEngine.from_model(model, max_slots=3, max_context_len=LIMITS.max_tokens)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("kind", MODELS)
async def test_the_trainers_logprobs_are_the_engines(kind, temperature):
    model = model_of(kind)
    engine = engine_over(model)
    played = await episodes(engine, temperature)
    assert max(len(episode.turns) for episode in played) >= 3
    gathered = samples(played, temperature)
    scores = await trainer_over(model).score(gathered)
    for sample, logprobs in zip(gathered, scores.proximal, strict=True):
        mask = sample.loss_mask
        exact = reference(model, sample)
        assert sample.logprobs[mask] == pytest.approx(exact[mask], abs=1e-4)
        assert logprobs[mask] == pytest.approx(sample.logprobs[mask], abs=1e-4)
        # The scores cover the world's tokens too: others may want a baseline over them.
        assert logprobs == pytest.approx(exact, abs=1e-4)
    await engine.close()


@pytest.mark.parametrize("kind", MODELS)
async def test_after_an_update_both_move_on_together(kind):
    temperature = 1.0
    model = model_of(kind)
    engine, trainer = engine_over(model), trainer_over(model)
    before = samples(await episodes(engine, temperature), temperature)
    rng = np.random.default_rng(0)
    advantages = tuple(rng.normal(size=len(s)).astype(np.float32) for s in before)
    old = Scores(tuple(sample.logprobs for sample in before))
    await trainer.update(TrainBatch(tuple(before), old, Credit(advantages, token_mean(before))))

    stale = await trainer.score(before)
    moved = [
        np.abs(now - s.logprobs)[s.loss_mask].max() for now, s in zip(stale.proximal, before, strict=True)
    ]
    assert max(moved) > 1e-2

    await trainer.publish(engine.sink, version=1)
    after = samples(await episodes(engine, temperature, seed=100), temperature)
    scores = await trainer.score(after)
    for sample, logprobs in zip(after, scores.proximal, strict=True):
        assert set(sample.versions.tolist()) == {NO_VERSION, 1}
        assert logprobs[sample.loss_mask] == pytest.approx(sample.logprobs[sample.loss_mask], abs=1e-4)
    assert {version for s in before for version in s.versions.tolist()} == {NO_VERSION, 0}
    await engine.close()


async def test_the_same_seeds_sample_the_same_tokens_whatever_else_is_in_flight():
    model = model_of("qwen3")
    engine = engine_over(model)
    together = samples(await episodes(engine, 1.0, count=6), 1.0)
    again = samples(await episodes(engine, 1.0, count=3), 1.0)
    for first, second in zip(together, again, strict=False):
        assert first.token_ids.tolist() == second.token_ids.tolist()
    await engine.close()


async def test_weights_published_in_the_middle_of_an_episode_are_told_token_by_token():
    """Tokens of both versions stand in one Sample, each with its own version and its own logprob."""
    model = model_of("qwen3")
    engine, trainer = engine_over(model), trainer_over(model)
    first = samples(await episodes(engine, 1.0), 1.0)
    rng = np.random.default_rng(0)
    credit = Credit(tuple(rng.normal(size=len(s)).astype(np.float32) for s in first), token_mean(first))
    old_model = model_of("qwen3")
    await trainer.update(TrainBatch(tuple(first), Scores(tuple(s.logprobs for s in first)), credit))

    class Interrupted(Bytes):
        """Publishes before the third turn."""

        def __init__(self):
            self.turns = 0

        def parse(self, ids, tools, *, prompt_ids=()):
            self.turns += 1
            return super().parse(ids, tools, prompt_ids=prompt_ids)

    async def publish_after_two_turns(renderer):
        while renderer.turns < 2:
            await asyncio.sleep(0)
        # The episode is short: without the pause it could end while the weights are loaded.
        engine.pause()
        await trainer.publish(engine.sink, version=7)
        engine.resume()

    renderer = Interrupted()
    env = Oracle([["x"], ["y"], ["z"], ["w"]], Limits(max_turns=5, max_tokens=90))
    agent = TokenAgent(engine, renderer, SamplingSettings(max_response_len=40))
    task = Task("t", (Message("user", "abcd"),))
    episode, _ = await asyncio.gather(
        play(env, agent, task, episode_id="mixed", sampling_seed=2), publish_after_two_turns(renderer)
    )
    (sample,) = samples_of(episode)
    versions = sample.versions[sample.loss_mask].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    under_old = sample.loss_mask & (sample.versions == 0)
    under_new = sample.loss_mask & (sample.versions == 7)
    assert sample.logprobs[under_old] == pytest.approx(reference(old_model, sample)[under_old], abs=1e-4)
    assert sample.logprobs[under_new] == pytest.approx(reference(model, sample)[under_new], abs=1e-4)
    await engine.close()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("kind", MODELS)
async def test_the_trainers_logprobs_are_the_engines_for_many_models(kind, temperature, seed):
    model = model_of(kind, seed)
    engine = engine_over(model)
    gathered = samples(await episodes(engine, temperature, count=16, seed=1000 * seed), temperature)
    scores = await trainer_over(model).score(gathered)
    for sample, logprobs in zip(gathered, scores.proximal, strict=True):
        assert logprobs[sample.loss_mask] == pytest.approx(sample.logprobs[sample.loss_mask], abs=1e-4)
    await engine.close()
