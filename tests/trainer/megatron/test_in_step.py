"""Every layout takes proximal logprobs from the step itself, as the torch trainer does."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest

from agentrl.algorithms.corrections import FactorsInStep, IcePop, Mis, Tis
from agentrl.algorithms.gates import InStages, TokenGate
from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning, step_metrics
from agentrl.trainer.torch.forward import TorchNetwork, token_outputs
from agentrl.trainer.torch.learner import Learner as TorchLearner
from agentrl.types import ProximalInStep, RolloutId, Scores, TrainBatch
from tests.trainer.megatron import equality
from tests.trainer.megatron.models import checkpoint_of, model_of
from tests.trainer.megatron.test_equality import PAIRS
from tests.trainer.megatron.test_losses import batch
from tests.trainer.tiny import gradients_of, settings

CORRECTIONS = {
    "tis": Tis(1.1, 0.9),
    "icepop": IcePop(0.9, 1.2),
    "mis": Mis("geometric", "mask", 0.9, 1.1),
    "gate": InStages(Tis(1.2), TokenGate("k3", "max", 0.1)),
    "none": None,
}
QUICK = {
    "DP2": "gate",
    "TP2": "mis",
    "TP2+SP": "icepop",
    "PP2": "tis",
    "PP2, virtual": "none",
    "PP2, uneven": "gate",
    "CP2": "mis",
}


@lru_cache
def in_step(name: str) -> TrainBatch:
    """One sample a rollout. The proximal logprobs of the scores are far off: they must not be used."""
    given, correction = batch("token mean"), CORRECTIONS[name]
    behaviour = given.scores.proximal
    samples = tuple(
        replace(s, rollout_id=RolloutId(f"r{n}"), logprobs=(behaviour[n] * s.loss_mask).astype(np.float32))
        for n, s in enumerate(given.samples)
    )
    wrong = tuple((array - 3.0).astype(np.float32) for array in behaviour)
    factors = None if correction is None else FactorsInStep(correction)
    return replace(given, samples=samples, scores=Scores(wrong), in_step=ProximalInStep(factors))


@lru_cache
def expected(name: str):
    """The torch trainer, with a pass for the proximal logprobs and numpy's factors: gradients and sums."""
    train_batch = in_step(name)
    own = []
    logps = equality.oracle("qwen3").logps
    for number, sample in enumerate(train_batch.samples):
        own.append(np.zeros(len(sample), np.float32))
        own[-1][sample.loss_mask] = logps[number]
    factors = train_batch.in_step.factors
    credit = train_batch.credit
    if factors is not None:
        weighed = zip(credit.advantages, factors(train_batch.samples, own), strict=True)
        credit = replace(credit, advantages=tuple(a * f for a, f in weighed))
    scored = replace(train_batch, scores=Scores(tuple(own)), credit=credit, in_step=None)
    policy = model_of("qwen3")
    learner = TorchLearner(
        TorchNetwork(policy), partial(token_outputs, bf16=False), Learning(PolicyLoss(), settings(), 10)
    )
    with gradients_of(policy) as gradients:
        sums = learner.learn(scored)
    assert sums.logprobs == {}
    return gradients, step_metrics([sums], scored), own


def part_of(layout: MegatronConfig, _rank: int, train_batch: TrainBatch):
    """Runs in a rank: gradients, sums, logprobs, and whether a step without a gradient is left out."""
    from agentrl.trainer.loss_inputs import StepInputs
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model = model_of("qwen3")
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    learner = MegatronLearner(network, logprobs_of, Learning(PolicyLoss(), settings(), 10))
    rows = equality.share_of(layout, train_batch.samples)
    sums = learner.backward(rows, StepInputs(train_batch))
    # The next step overwrites their memory.
    gradients = [(name, gradient.copy()) for name, gradient in equality.gradients_in(network)]
    part = equality.Part(
        equality.place(), equality.places_of_experts(), [], gradients, sums.get("loss", 0.0), {}
    )
    done = learner.learn(rows, train_batch)
    before = [piece.parameter.detach().clone() for piece in network.pieces()]
    nothing = replace(train_batch, in_step=ProximalInStep(_zeros, True))
    left_out = learner.learn(rows, nothing)
    is_same = all(bool((b == p.parameter).all()) for b, p in zip(before, network.pieces(), strict=True))
    return part, sums, done, (left_out.is_left_out, is_same, learner.optimizer.done)


def _zeros(samples, proximal):
    return tuple(np.zeros(len(sample), np.float32) for sample in samples)


@pytest.mark.parametrize("layout", PAIRS)
def test_two_ranks_take_their_proximal_logprobs_from_the_step(pair, layout):
    # The distributed optimizer leaves each rank with the part of a gradient that it steps with.
    ranks = MegatronConfig(actor_num_gpus_per_node=2, use_distributed_optimizer=False, **PAIRS[layout])
    name = QUICK[layout]
    train_batch, (gradients, metrics, own) = in_step(name), expected(name)
    parts = pair.run(part_of, ranks, train_batch)
    shape = shape_of(model_of("qwen3").config)
    actual = equality.gradients_of("qwen3", shape, ranks, [part for part, *_ in parts])
    for parameter, gradient in gradients.items():
        assert gradient.norm() > 0
        assert (actual[parameter] - gradient).norm() <= 1e-5 * gradient.norm(), parameter
    sums = [sums for _, sums, *_ in parts]
    for metric in ("pg_loss", "entropy_loss", "ppo_kl"):
        mean = sum(each.get(metric, 0.0) for each in sums) / train_batch.num_loss_tokens
        assert mean == pytest.approx(metrics[metric], rel=1e-4, abs=1e-5)
    told = {}
    for _, _, done, _ in parts:
        assert not done.is_left_out
        assert not told.keys() & done.logprobs.keys()
        told |= done.logprobs
    assert told.keys() == {n for n, sample in enumerate(train_batch.samples) if sample.loss_mask.any()}
    for number, values in told.items():
        mask = train_batch.samples[number].loss_mask
        np.testing.assert_allclose(values, own[number][mask], atol=1e-5)
    assert [(left, same, done.steps) for *_, (left, same, done) in parts] == [(True, True, 1)] * 2
