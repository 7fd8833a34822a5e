"""What the penalty in the reward minimises, by enumeration: every sequence of small policies counts as often
as it is sampled, so an expectation is a sum and nothing is left to chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from agentrl.algorithms.estimators import Gae
from agentrl.algorithms.group_relative import GroupRelative, TurnRelative
from agentrl.algorithms.returns import discounted_returns
from agentrl.algorithms.rewards import KlPenalty, kl_estimate
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Tokens
from agentrl.types import Group, Scores, Verdict
from tests.algorithms.episodes import TASK, episode, turn

VOCABULARY, LONGEST, STOP = 3, 3, 0
ESTIMATORS = {
    "grpo": GroupRelative(kl=KlPenalty(1.0)),
    "turns": TurnRelative(kl=KlPenalty(1.0)),
    "ppo": Gae(kl=KlPenalty(1.0)),
}


def sequences(prefix=()):
    """All that can be sampled: a sequence ends with STOP, or at LONGEST tokens."""
    if prefix and (prefix[-1] == STOP or len(prefix) == LONGEST):
        yield prefix
        return
    for token in range(VOCABULARY):
        yield from sequences((*prefix, token))


SEQUENCES = list(sequences())
PREFIXES = sorted({s[:n] for s in SEQUENCES for n in range(len(s))})


def logprobs(logits):
    """Of each token of each sequence, given those before it; float64, with a gradient."""
    table = torch.log_softmax(logits, dim=-1)
    return [torch.stack([table[PREFIXES.index(s[:n]), s[n]] for n in range(len(s))]) for s in SEQUENCES]


@dataclass(frozen=True)
class Enumerated:
    """A policy, a reference, and all sequences as a batch."""

    logits: torch.Tensor
    logp: list[torch.Tensor]
    ref: list[torch.Tensor]

    @classmethod
    def of(cls, seed):
        rng = torch.Generator().manual_seed(seed)
        logits, reference = torch.randn(2, len(PREFIXES), VOCABULARY, generator=rng, dtype=torch.float64)
        logits.requires_grad_(True)
        return cls(logits, logprobs(logits), logprobs(reference))

    def batch(self):
        """Each sequence alone in its group, worth nothing, so that all it is credited with is the penalty."""
        episodes = [episode(f"e{i}", [turn([1], s)]) for i, s in enumerate(SEQUENCES)]
        groups = [Group(e.id, TASK, 0, (e,), (Verdict(e.id, "s", 0.0),)) for e in episodes]
        samples = [sample for e in episodes for sample in samples_of(e)]
        old, ref = (
            tuple(np.concatenate([[0.0], seq_logp.detach().numpy()]) for seq_logp in logp)
            for logp in (self.logp, self.ref)
        )
        return groups, samples, Scores(old, ref=ref, values=tuple(np.zeros(len(s)) for s in samples))

    def of_the_divergence(self):
        """The gradient of sum over sequences of policy x log(policy / reference)."""
        kl = sum(
            seq_logp.sum().exp() * (seq_logp.sum() - ref.sum())
            for seq_logp, ref in zip(self.logp, self.ref, strict=True)
        )
        return torch.autograd.grad(kl, self.logits, retain_graph=True)[0]

    def of_the_reward(self, advantages):
        """The expected policy gradient, as descent: minus sum of policy x advantage x score."""
        terms = zip(self.logp, advantages, strict=True)
        surrogate = sum(
            seq_logp.sum().exp().detach() * (torch.tensor(a) * seq_logp).sum() for seq_logp, a in terms
        )
        return -torch.autograd.grad(surrogate, self.logits, retain_graph=True)[0]


def by_sequence(advantages_N):
    return np.split(advantages_N, np.cumsum([len(s) for s in SEQUENCES])[:-1])


def relative_error(gradient, exact):
    return float((gradient - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_the_penalty_has_the_gradient_of_the_divergence(name, seed):
    policy = Enumerated.of(seed)
    groups, samples, scores = policy.batch()
    tokens = Tokens.of(samples)
    advantages = by_sequence(ESTIMATORS[name](groups, tokens, tokens.scores(scores)).advantages_N)
    assert relative_error(policy.of_the_reward(advantages), policy.of_the_divergence()) <= 1e-6


def test_estimates_that_are_right_in_the_loss_are_wrong_in_the_reward():
    cosines = {"k1": [], "k2": [], "k3": []}
    for seed in range(20):
        policy = Enumerated.of(seed)
        _, samples, scores = policy.batch()
        tokens = Tokens.of(samples)
        exact = policy.of_the_divergence()
        for kind, values in cosines.items():
            token_scores = tokens.scores(scores)
            penalty_N = kl_estimate(token_scores.proximal_N, token_scores.ref_N, kind)
            gradient = policy.of_the_reward(by_sequence(-discounted_returns(penalty_N, tokens)))
            values.append(float((gradient * exact).sum() / (gradient.norm() * exact.norm())))
    assert min(cosines["k1"]) > 1 - 1e-9
    # On average far from parallel, and at worst uphill.
    assert np.mean(cosines["k3"]) < 0.8
    assert min(cosines["k3"]) < 0
    assert np.mean(cosines["k2"]) < 0.8
