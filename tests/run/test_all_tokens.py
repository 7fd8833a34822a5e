"""Whole steps in which a token's term depends on other tokens of the batch, against oracles in float64.

The batch has groups whose rewards are all equal. verl and TRL compute covariances, quantiles of entropies and
means of factors over every token that was sampled, and so do the oracles: from a model's logits, with none of
the package's code between these and the gradient.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from math import exp
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest
import torch

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly.algorithm import build_algorithm
from agentrl.run.loop import Loop
from agentrl.trainer.torch import AuxiliaryModels
from tests.run.in_step import Noting, distance, iterations, near
from tests.run.tables import producer_of
from tests.run.test_whole_step import GROUPS, MAX_LENGTH, advantages
from tests.trainer.tiny import gradients_of, qwen3, trainer

IDLE = ("b", "d", "f")
"""The groups without signal."""


class Token(NamedTuple):
    """One sampled token. logp, entropy: of the model, as scalars with a gradient; engine: of the engine.
    squares: the sum of the squared probabilities of the vocabulary."""

    group: str
    rollout: str
    logp: torch.Tensor
    entropy: torch.Tensor
    engine: float
    advantage: float
    squares: float


def tokens_of(model, groups, advantages) -> list[Token]:
    """Every sampled token of the groups. advantages: of all tokens of each episode."""
    found = []
    played = [(group.id, episode) for group in groups for episode in group.episodes]
    for (group, episode), credit in zip(played, advantages, strict=True):
        (trajectory,) = episode.trajectories
        ids, places, engine = [], [], []
        for turn in trajectory.turns:
            ids += turn.tokens.world_ids.tolist()
            sampled = turn.tokens.completion.token_ids.tolist()
            places += range(len(ids), len(ids) + len(sampled))
            ids += sampled
            engine += turn.tokens.completion.logprobs.tolist()
        logp_TV = torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], -1)
        for place, other, advantage in zip(places, engine, credit, strict=True):
            row = logp_TV[place - 1]
            entropy, squares = -(row.exp() * row).sum(), row.exp().square().sum().item()
            found.append(Token(group, episode.id, row[ids[place]], entropy, other, advantage, squares))
    return found


def grpo_tokens(model, groups) -> list[Token]:
    return tokens_of(model, groups, advantages("grpo", groups, 1.0, 1.0, False))


# What each makes of the advantages: its factors, over the tokens that it is given.


def clip_cov(tokens):
    """arXiv 2505.22617, with a ratio of 1: all tokens whose covariance is between 0.2 and 3."""
    mean_a, mean_logp = fmean(t.advantage for t in tokens), fmean(t.logp.item() for t in tokens)
    covariances = [(t.advantage - mean_a) * (t.logp.item() - mean_logp) for t in tokens]
    return [0.0 if 0.2 < c < 3.0 else 1.0 for c in covariances]


def top_entropy(tokens):
    """arXiv 2506.01939: the half of highest entropy, as TRL's quantile has it."""
    entropies = torch.stack([t.entropy.detach() for t in tokens])
    return (entropies >= torch.quantile(entropies, 0.5)).double().tolist()


def tis_normalized(tokens):
    """verl's batch normalisation: truncated ratios, over their mean."""
    ratios = [min(exp(t.logp.item() - t.engine), 1.1) for t in tokens]
    return [ratio / fmean(ratios) for ratio in ratios]


def mis_normalized(tokens):
    """The same over sequences, each of which counts once."""
    gaps = {}
    for token in tokens:
        gaps.setdefault(token.rollout, []).append(token.logp.item() - token.engine)
    ratios = {rollout: min(exp(sum(own)), 2.0) for rollout, own in gaps.items()}
    return [ratios[t.rollout] / fmean(ratios.values()) for t in tokens]


CASES = {
    "clip_cov": (
        {
            "entropy_control": "clip_cov",
            "clip_cov_ratio": 1.0,
            "clip_cov_low": 0.2,
            "clip_cov_high": 3.0,
            "accept_bias": True,
        },
        clip_cov,
    ),
    "top_entropy": (
        {"entropy_control": "top_entropy", "top_entropy_quantile": 0.5, "accept_bias": True},
        top_entropy,
    ),
    "tis, normalized": (
        {"correction": "tis", "tis_clip": 1.1, "self_normalize_correction": True},
        tis_normalized,
    ),
    "mis of sequences, normalized": (
        {"correction": "mis", "mis_level": "sequence", "mis_upper": 2.0, "self_normalize_correction": True},
        mis_normalized,
    ),
}


def gradient_of(model, tokens, factors):
    """Of -sum of factor x advantage x logp over the tokens, divided by their number."""
    terms = [-f * t.advantage * t.logp / len(tokens) for f, t in zip(factors, tokens, strict=True)]
    return gradient(model, torch.stack(terms).sum())


def gradient(model, loss):
    model.zero_grad()
    loss.backward(retain_graph=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def over_signal_only(tokens, factors_of):
    """Factors whose statistics leave the idle groups out."""
    own = iter(factors_of([t for t in tokens if t.group not in IDLE]))
    return [0.0 if t.group in IDLE else next(own) for t in tokens]


@pytest.mark.parametrize("case", CASES)
async def test_the_gradient_of_a_step_has_its_statistics_over_all_tokens(case):
    settings, factors_of = CASES[case]
    model = qwen3()
    groups = near(model, GROUPS, 0.15)
    tokens = grpo_tokens(model, groups)
    expected = gradient_of(model, tokens, factors_of(tokens))
    other = gradient_of(model, tokens, over_signal_only(tokens, factors_of))
    (iteration,), _, actual = await iterations(model, groups, settings)
    assert distance(actual, expected) <= 1e-6
    assert distance(other, expected) > 1e-3
    # They have no gradient of their own, and are in no backward pass.
    assert [group.id for group in iteration.dropped] == list(IDLE)


@pytest.mark.parametrize("coefficient", [{"entropy_coef": 1e-9}, {"use_kl_loss": True, "kl_loss_coef": 1e-9}])
@pytest.mark.parametrize("case", [*CASES, "kl_cov"])
async def test_a_term_of_nearly_nothing_changes_the_gradient_by_nearly_nothing(case, coefficient):
    settings = CASES[case][0] if case in CASES else {"entropy_control": "kl_cov", "accept_bias": True}
    gradients = []
    for more in ({}, coefficient):
        model = qwen3()
        groups = near(model, GROUPS, 0.15)
        algorithm = build_algorithm(
            AlgorithmConfig(**settings, **more), max_length=MAX_LENGTH, max_staleness=2
        )
        reference = {"ref": copy.deepcopy(model)} if "use_kl_loss" in more else {}
        gradients.append(await gradient_of_step(model, groups, algorithm, **reference))
    assert distance(gradients[1], gradients[0]) <= 1e-6


async def gradient_of_step(model, groups, algorithm, **reference):
    inner = trainer(model, algorithm.loss, auxiliary=AuxiliaryModels(**reference))
    loop = Loop(producer_of([groups]), Noting(inner), algorithm, None, 1)
    with gradients_of(model) as gradients:
        await loop.iterate(0)
    return gradients


async def test_the_share_that_clip_cov_takes_is_one_of_all_tokens():
    bounds = {"clip_cov_ratio": 0.2, "clip_cov_low": -1e3, "clip_cov_high": 1e3}
    settings = {"entropy_control": "clip_cov", "accept_bias": True, **bounds}
    model = qwen3()
    groups = near(model, GROUPS, 0.15)
    tokens = grpo_tokens(model, groups)
    (iteration,), _, _ = await iterations(model, groups, settings)
    lost = int(0.2 * len(tokens))
    assert lost != int(0.2 * len([t for t in tokens if t.group not in IDLE]))
    assert iteration.metrics["train/clip_cov_fraction"] == pytest.approx(lost / len(tokens))


# KL-Cov: the tokens of the highest covariance, and no clip.

HELD = {
    "entropy_control": "kl_cov",
    "kl_cov_ratio": 0.25,
    "kl_cov_coef": 0.8,
    "accept_bias": True,
    "ppo_epochs": 2,
}


def held_terms(tokens, proximal):
    """arXiv 2505.22617: -A ratio, and for some tokens coef x |logp - proximal|; no clip."""
    number = int(0.25 * len(tokens))
    mean_a, mean_logp = fmean(t.advantage for t in tokens), fmean(proximal)
    covariances = [
        (t.advantage - mean_a) * (old - mean_logp) for t, old in zip(tokens, proximal, strict=True)
    ]
    held = set(np.argsort(covariances)[::-1][:number].tolist())
    terms = []
    for n, (token, old) in enumerate(zip(tokens, proximal, strict=True)):
        term = -token.advantage * (token.logp - old).exp()
        terms.append(term + 0.8 * (token.logp - old).abs() if n in held else term)
    return torch.stack(terms).sum() / len(tokens)


@pytest.mark.parametrize("lr", [1e-2, 3e-2])
async def test_the_gradients_of_two_steps_are_those_of_kl_cov(lr):
    model = qwen3()
    groups = near(model, GROUPS, 0.15)
    before = copy.deepcopy(model)
    await iterations(after := copy.deepcopy(model), groups, {**HELD, "ppo_epochs": 1}, lr=lr)
    _, noting, actual = await iterations(model, groups, HELD, lr=lr, num_epochs=2)
    assert noting.updates == 2
    proximal = [token.logp.item() for token in grpo_tokens(before, groups)]
    tokens = grpo_tokens(after, groups)
    ratios = [exp(t.logp.item() - old) for t, old in zip(tokens, proximal, strict=True)]
    beyond = [ratio for ratio in ratios if not 0.8 <= ratio <= 1.28]
    assert len(beyond) > 5, "a clip would act"
    assert distance(actual, gradient(after, held_terms(tokens, proximal))) <= 1e-5


@pytest.mark.parametrize("noise", [0.0, 1e-5])
async def test_where_proximal_and_current_differ_by_rounding_alone_nothing_is_held(noise):
    """Before the first update they are of the same weights, in rows that hold other samples."""

    class Rounded(Noting):
        async def score(self, samples, roles=("old",), *, statistics=False):
            scores = await super().score(samples, roles, statistics=statistics)
            draw = np.random.default_rng(3)
            noisy = (p + draw.normal(0.0, noise, p.shape).astype(np.float32) for p in scores.proximal)
            return replace(scores, proximal=tuple(noisy))

    gradients = []
    for settings in (HELD, {"accept_bias": True, "eps_clip": 1.0, "eps_clip_high": 1e3}):
        model = qwen3()
        groups = near(model, GROUPS, 0.15)
        algorithm = build_algorithm(AlgorithmConfig(**settings), max_length=MAX_LENGTH, max_staleness=2)
        loop = Loop(producer_of([groups]), Rounded(trainer(model, algorithm.loss)), algorithm, None, 1)
        with gradients_of(model) as of_step:
            await loop.iterate(0)
        gradients.append(of_step)
    assert distance(*gradients) <= 10 * noise + 1e-6


def lengths_of(group):
    """A 1 for each sampled token, by episode."""
    turns = [[turn.tokens.completion for turn in episode.turns] for episode in group.episodes]
    return [[1.0] * sum(len(completion.token_ids) for completion in own) for own in turns]


def optimal_baselines(model, groups):
    """arXiv 2602.07078 over a padded group, [G, T], as verl does by default: 0 where one sibling is alone."""
    rows = []
    for group in groups:
        own = tokens_of(model, [group], lengths_of(group))
        by_episode = [[t for t in own if t.rollout == e.id] for e in group.episodes]
        longest = max(map(len, by_episode))
        energy_GT, mask_GT = torch.zeros(2, len(by_episode), longest, dtype=torch.float64)
        for g, sampled in enumerate(by_episode):
            for t, token in enumerate(sampled):
                energy_GT[g, t] = 1 - 2 * token.logp.detach().exp() + token.squares
                mask_GT[g, t] = 1.0
        returns_GT = torch.tensor([[v.total] for v in group.verdicts], dtype=torch.float64) * mask_GT
        weight_GT = energy_GT.cumsum(1) * mask_GT
        baseline_T = (weight_GT * returns_GT).sum(0) / weight_GT.sum(0)
        baseline_T[mask_GT.sum(0) == 1] = 0.0
        for row_T, sampled in zip(returns_GT - baseline_T, by_episode, strict=True):
            rows.append(row_T[: len(sampled)].tolist())
    return rows


async def test_the_gradient_of_otb_reaches_the_end_of_the_longest_answer():
    model = qwen3()
    groups = near(model, GROUPS, 0.15)
    credit = optimal_baselines(model, groups)
    tokens = tokens_of(model, groups, credit)
    expected = gradient_of(model, tokens, [1.0] * len(tokens))
    settings = {"advantage_estimator": "otb", "accept_bias": True}
    (iteration,), _, actual = await iterations(model, groups, settings)
    assert distance(actual, expected) <= 1e-6
    # The siblings of b have equal rewards, and one is longer: its end has a gradient.
    assert [group.id for group in iteration.dropped] == ["d"]
