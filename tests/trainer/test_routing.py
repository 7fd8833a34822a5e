"""Routing replay under the torch trainer: against models whose routers are made to choose, one by one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

import agentrl
from agentrl import Limits, Task
from agentrl.algorithms.samples import samples_of
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.errors import ModelLoadError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import REPLAYED_EXPERTS, ROUTED_EXPERTS, Credit, Extra, Scores, TrainBatch
from agentrl.weights.hf.routing import expert_sizes
from tests.engine.routes import routers_in, routes_of
from tests.runtime.test_extras import Letters
from tests.trainer.families import family
from tests.trainer.routes import Forced, made_to_choose, replayed, routed, with_samples
from tests.trainer.tiny import batch, gradients_of, reference_gradient, siblings, trainer
from tests.worlds import Parrot

PACKED, FOLDED = ("qwen3_moe", "mixtral", "glm4_moe"), ("deepseek_v3",)
KINDS = (*PACKED, *FOLDED)


def routed_batch(model, made, seed=0):
    sizes = expert_sizes(model.config)
    train_batch = made()
    layers = len(sizes.layers.numbers)
    return with_samples(train_batch, routed(train_batch.samples, layers, sizes.experts, sizes.layers.k, seed))


def expect_gradients(actual, expected):
    most = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=2e-6 * most, msg=key)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("made", [batch, siblings])
@pytest.mark.parametrize("name", KINDS)
async def test_the_gradient_is_that_of_the_experts_that_the_engine_took(name, made, recomputes):
    """Siblings begin with the same tokens, whose experts differ."""
    model = family(name)
    train_batch = routed_batch(model, made)
    expected_loss, expected = reference_gradient(
        Forced(model, train_batch.samples), train_batch, imitation=False
    )
    _, plain = reference_gradient(model, train_batch, imitation=False)
    assert max(float((plain[key] - expected[key]).abs().max()) for key in plain) > 1e-3
    settings = {"max_tokens_per_gpu": 30, "router_replay": "R3", "gradient_checkpointing": recomputes}
    with gradients_of(model) as actual:
        report = await trainer(model, PolicyLoss(), **settings).update(train_batch)
    assert report.metrics["train/loss"] == pytest.approx(expected_loss, rel=1e-5)
    expect_gradients(actual, expected)


@torch.no_grad()
def logprobs_by_prefix(model, sample, rows):
    """The logprob of each token but the first, from a pass over what is before it and no more."""
    logprobs = [0.0]
    for end in range(1, len(sample)):
        ids = torch.from_numpy(sample.token_ids[:end].astype(np.int64))
        with made_to_choose(model, rows):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -1]
        logp = (logits.double() / float(sample.temperatures[end])).log_softmax(-1)
        logprobs.append(float(logp[sample.token_ids[end]]))
    return np.array(logprobs)


@pytest.mark.parametrize("name", KINDS)
async def test_logprobs_are_those_of_every_prefix_with_the_engines_experts(name):
    model = family(name)
    samples = routed_batch(model, siblings).samples
    scores = await trainer(model, max_tokens_per_gpu=30, router_replay="R3").score(samples)
    plain = await trainer(model, max_tokens_per_gpu=30).score(samples)
    for sample, proximal, own in zip(samples, scores.proximal, plain.proximal, strict=True):
        expected = logprobs_by_prefix(model, sample, sample.extras[ROUTED_EXPERTS].values)
        np.testing.assert_allclose(proximal, expected, atol=1e-5)
        assert np.abs(own - proximal).max() > 1e-3
    assert scores.routed is None


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("made", [batch, siblings])
async def test_the_update_takes_the_experts_of_the_pass_before_it(name, made):
    """R2: what each token went through is kept by token, and replayed after the weights have changed."""
    model = family(name)
    train_batch = made()
    learner = trainer(model, PolicyLoss(), max_tokens_per_gpu=30, router_replay="R2")
    scores = await learner.score(train_batch.samples)
    assert scores.routed is not None
    for sample, rows in zip(train_batch.samples, scores.routed, strict=True):
        expected = routes_of(model, sample.token_ids.tolist())
        np.testing.assert_array_equal(np.sort(rows[:-1], -1), expected[:-1])
        assert (rows[-1] == -1).all()
    with torch.no_grad():
        for router in routers_in(model):
            router.weight.neg_()
    samples = replayed(train_batch.samples, scores.routed)
    _, expected = reference_gradient(Forced(model, samples, REPLAYED_EXPERTS), train_batch, imitation=False)
    with gradients_of(model) as actual:
        await learner.update(replace(train_batch, scores=replace(train_batch.scores, routed=scores.routed)))
    expect_gradients(actual, expected)


@torch.no_grad()
def logits_of_routers(model, ids):
    seen = []
    handles = [
        router.register_forward_hook(lambda module, _inputs, outputs: seen.append((module, outputs[0])))
        for router in routers_in(model)
    ]
    model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def expected_metrics(model, samples):
    """By every prefix: which experts each token takes, and the probabilities of each router."""
    layers = len(routers_in(model))
    taken, entropies, others = [], [], []
    for sample in samples:
        if not sample.loss_mask.any():
            continue
        end = int(np.flatnonzero(sample.loss_mask)[-1])
        ids = sample.token_ids[:end].tolist()
        own, engines = routes_of(model, ids), sample.extras[ROUTED_EXPERTS].values[:end]
        taken.append(own)
        known = (engines >= 0).all((1, 2))
        others += [
            bool((np.sort(engines[t, x]) != own[t, x]).any())
            for t in np.flatnonzero(known)
            for x in range(layers)
        ]
        seen = logits_of_routers(model, ids)
        for router, logits in seen:
            if hasattr(router, "e_score_correction_bias"):
                scores = logits.double().sigmoid()
                probs = scores / scores.sum(-1, keepdim=True)
            else:
                probs = logits.double().softmax(-1)
            entropies += [float(-(p * p.log()).sum()) for p in probs]
    every = np.concatenate(taken)
    loads = [np.bincount(every[:, layer].ravel(), minlength=4) for layer in range(layers)]
    return {
        "train/moe_router_mismatch": np.mean(others),
        "train/moe_load_imbalance": np.mean([load.max() / load.mean() for load in loads]),
        "train/moe_router_entropy": np.mean(entropies),
    }


@pytest.mark.parametrize("made", [batch, siblings])
@pytest.mark.parametrize("name", KINDS)
async def test_a_step_says_how_its_tokens_were_routed(name, made):
    model = family(name)
    train_batch = routed_batch(model, made)
    # Half of the tokens have the experts that the trainer takes, too.
    samples = []
    for number, sample in enumerate(train_batch.samples):
        rows = sample.extras[ROUTED_EXPERTS].values.copy()
        if number % 2:
            rows[:-1] = routes_of(model, sample.token_ids.tolist())[:-1, :, ::-1]
        samples.append(replace(sample, extras={ROUTED_EXPERTS: Extra.dense(rows, fill=-1)}))
    expected = expected_metrics(model, samples)
    assert 0.1 < expected["train/moe_router_mismatch"] < 0.9
    report = await trainer(model, max_tokens_per_gpu=30).update(with_samples(train_batch, samples))
    for key, value in expected.items():
        assert report.metrics[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize("replay", ["R2", "R3"])
async def test_under_replay_the_share_is_of_what_the_trainer_would_take(replay):
    """Of one layer of experts: with several, those below change what the others would take."""
    model = family("glm4_moe")
    train_batch = routed_batch(model, batch)
    expected = expected_metrics(model, train_batch.samples)["train/moe_router_mismatch"]
    report = await trainer(model, max_tokens_per_gpu=30, router_replay=replay).update(train_batch)
    assert report.metrics["train/moe_router_mismatch"] == pytest.approx(expected)
    assert expected > 0.3


class Chatty(Parrot):
    limits = Limits(max_turns=4, max_tokens=110)


async def played(model):
    """Episodes of an engine that serves the model, of several turns with tools in between."""
    engine = EmbeddedEngine.from_model(model, max_slots=3, max_context_len=120)
    layers = expert_sizes(model.config).layers
    settings = SamplingSettings(max_response_len=6, return_routed_experts=layers)
    task = Task.ask("t", "How many are 3 and 4?", answer="7")
    episodes = await asyncio.gather(
        *(
            agentrl.play(
                Chatty(),
                TokenAgent(engine, Letters(), settings),
                task,
                episode_id=f"e{number}",
                sampling_seed=number,
            )
            for number in range(6)
        )
    )
    await engine.close()
    return tuple(sample for episode in episodes for sample in samples_of(episode))


def far_off(samples, scores):
    return max(
        float(np.abs(sample.logprobs - logprobs)[sample.loss_mask].max())
        for sample, logprobs in zip(samples, scores.proximal, strict=True)
    )


async def test_an_engine_with_a_planted_bias_is_followed_token_by_token():
    """The bias changes what the engine's routers choose, and no weight: with its experts nothing differs."""
    model, biased = family("glm4_moe").float(), family("glm4_moe").float()
    for router in routers_in(biased):
        router.e_score_correction_bias.copy_(torch.tensor([0.4, -0.4, 0.3, -0.3]))
    samples = await played(biased)
    assert max(len(np.flatnonzero(np.diff(sample.loss_mask.astype(int)) == 1)) for sample in samples) == 4
    plain = await trainer(model).score(samples)
    assert far_off(samples, plain) > 0.1
    replaying = trainer(model, router_replay="R3", max_tokens_per_gpu=60)
    assert far_off(samples, await replaying.score(samples)) < 1e-4
    ones = tuple(sample.loss_mask.astype(np.float32) for sample in samples)
    scores = Scores(tuple(sample.logprobs for sample in samples))
    report = await replaying.update(TrainBatch(samples, scores, Credit(ones, ones)))
    expected = expected_metrics(model, samples)["train/moe_router_mismatch"]
    assert report.metrics["train/moe_router_mismatch"] == pytest.approx(expected)
    assert expected > 0.2
    # Of one token's experts nothing is known, and that shows.
    blind = [rows_without(sample, int(np.flatnonzero(sample.loss_mask)[0])) for sample in samples]
    assert far_off(blind, await replaying.score(blind)) > 1e-3


def rows_without(sample, position):
    rows = sample.extras[ROUTED_EXPERTS].values.copy()
    rows[position] = -1
    return replace(sample, extras={ROUTED_EXPERTS: Extra.dense(rows, fill=-1)})


async def test_a_dense_model_says_nothing_of_experts():
    report = await trainer(family("qwen3")).update(batch())
    assert not [key for key in report.metrics if "moe" in key]


async def test_experts_of_another_model_are_refused():
    model = family("qwen3_moe")
    made = batch()
    for layers, experts in ((3, 4), (2, 40)):
        samples = routed(made.samples, layers, experts, 2)
        with pytest.raises(TrainerError, match="must have one model"):
            await trainer(model, router_replay="R3").update(with_samples(made, samples))


def test_a_model_without_experts_is_refused():
    with pytest.raises(ModelLoadError, match="need a mixture of experts whose routers are known"):
        trainer(family("qwen3"), router_replay="R2")
