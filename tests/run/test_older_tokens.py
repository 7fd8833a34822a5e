"""Iterations on tokens of older weights, against the decoupled objective in float64.

Policies are tables of logits. Behaviour sampled the tokens: one policy the first half of each episode, a
later one the rest, as where the weights change in mid-episode. Proximal is the trainer's before the first
update of the batch, current the one that a gradient is computed of.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly.algorithm import build_algorithm
from agentrl.run.loop import Loop
from agentrl.types import Group
from tests.run.tables import POLICY, STEP_SIZE, TableTrainer, producer_of, table_of
from tests.run.test_whole_step import GROUPS, MAX_LENGTH, STEPS, advantages, pairs_of, weight

BEHAVIOUR = POLICY + 0.5 * table_of(7), POLICY + 0.3 * table_of(8)
OTHER_BEHAVIOUR = BEHAVIOUR[::-1]
EXACT = {"correction": "tis", "tis_clip": 1e6}


def logprobs(table, pairs):
    before, token = torch.tensor(pairs).unbind(1)
    return torch.log_softmax(torch.as_tensor(table), -1)[before, token]


def is_later(n, count):
    """Whether token n of an episode was sampled by the later of its two policies."""
    return 2 * n >= count


def behaviour_logprobs(tables, pairs):
    both = [logprobs(table, pairs) for table in tables]
    return [both[is_later(n, len(pairs))][n] for n in range(len(pairs))]


def turns_of(episode):
    return [turn.tokens for turn in episode.turns]


def sampled_by(tables, group: Group, versions=(3, 4)) -> Group:
    """The group with the logprobs of these two policies, and their versions."""
    episodes = []
    for episode in group.episodes:
        pairs = pairs_of(turns_of(episode))
        values = iter([value.item() for value in behaviour_logprobs(tables, pairs)])
        ages = iter([versions[is_later(n, len(pairs))] for n in range(len(pairs))])
        turns = []
        for turn in episode.turns:
            ids = turn.tokens.completion.token_ids
            completion = replace(
                turn.tokens.completion,
                logprobs=np.array([next(values) for _ in ids], np.float32),
                versions=np.array([next(ages) for _ in ids], np.int32),
            )
            turns.append(replace(turn, tokens=replace(turn.tokens, completion=completion)))
        (trajectory,) = episode.trajectories
        episodes.append(replace(episode, trajectories=(replace(trajectory, turns=tuple(turns)),)))
    return replace(group, episodes=tuple(episodes))


def loop_of(groups, num_steps=1, *, max_staleness=2, **settings):
    """A loop over the batch, which is trained while version 5 is served."""
    algorithm = build_algorithm(
        AlgorithmConfig(**settings), max_length=MAX_LENGTH, max_staleness=max_staleness
    )
    producer = producer_of([groups])
    producer.advance(0, version=5)
    return Loop(producer, TableTrainer(algorithm.loss), algorithm, object(), num_steps)


async def run_of(*args, **settings):
    loop = loop_of(*args, **settings)
    iteration = await loop.iterate(0)
    return loop.trainer.gradients, iteration.metrics


def decoupled(current, members, factor_of, proximal, *, kept=lambda n, count: True, eps=(0.2, 0.28)):
    """-E[factor x min(r A, clip(r) A)], r = current / proximal, summed token by token; to be minimised.

    factor_of: of the ratio proximal / BEHAVIOUR. kept: whether token n of an episode has a term.
    """
    played = [rollout for rollout, _ in members]
    total = torch.zeros((), dtype=torch.float64)
    for (*_, pairs), credit in members:
        now, before = (logprobs(table, pairs) for table in (current, proximal))
        then = behaviour_logprobs(BEHAVIOUR, pairs)
        for n, advantage in enumerate(credit):
            if not kept(n, len(pairs)):
                continue
            ratio = (now[n] - before[n]).exp()
            clipped = ratio.clamp(1 - eps[0], 1 + eps[1])
            factor = factor_of((before[n] - then[n]).exp().item())
            objective = factor * torch.minimum(ratio * advantage, clipped * advantage)
            total = total - weight("token", played, len(pairs)) * objective
    return total


def rollouts_of(groups):
    by_episode = advantages("grpo", groups, 1.0, 1.0, False)
    ids = [(group.id, episode) for group in groups for episode in group.episodes]
    everyone = [(id, None, None, pairs_of(turns_of(episode))) for id, episode in ids]
    return list(zip(everyone, by_episode, strict=True))


def expected_gradients(num_steps, factor_of, *, is_scored_again=False, **options):
    """is_scored_again: before each optimizer step, which is wrong."""
    table, gradients, everyone = torch.tensor(POLICY), [], rollouts_of(GROUPS)
    for step in STEPS[num_steps]:
        members = [(member, credit) for member, credit in everyone if member[0] in step]
        current = table.clone().requires_grad_()
        proximal = table if is_scored_again else POLICY
        loss = decoupled(current, members, factor_of, proximal, **options)
        (gradient,) = torch.autograd.grad(loss, current)
        gradients.append(gradient.numpy())
        table = table - STEP_SIZE * gradient
    return gradients


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


OBJECTIVES = {
    "the decoupled objective": (EXACT, lambda ratio: ratio),
    "its factor truncated": ({"correction": "tis", "tis_clip": 1.2}, lambda ratio: min(ratio, 1.2)),
    "its tokens beyond the bound left out": (
        {"correction": "icepop", "icepop_low": 0.0, "icepop_high": 1.2},
        lambda ratio: ratio if ratio <= 1.2 else 0.0,
    ),
    "no correction": ({"accept_bias": True}, lambda ratio: 1.0),
}


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("name", OBJECTIVES)
async def test_a_correction_and_the_clipped_loss_are_the_decoupled_objective(name, num_steps):
    settings, factor_of = OBJECTIVES[name]
    groups = [sampled_by(BEHAVIOUR, group) for group in GROUPS]
    gradients, _ = await run_of(groups, num_steps, **settings)
    assert_close(gradients, expected_gradients(num_steps, factor_of))


async def test_the_trainers_own_logprobs_as_old_ones_do_not_silently_switch_clipping_off():
    """One optimizer step: current is proximal, so the loss clips nothing, however far behaviour is away.

    Without a correction the gradient does not even depend on what sampled the tokens, which is why that is
    refused. A correction bounds what the loss cannot see, and the gauges show it.
    """
    gradients = {}
    for name, settings in (("none", {"accept_bias": True}), ("tis", {"correction": "tis", "tis_clip": 1.2})):
        for behaviour in (BEHAVIOUR, OTHER_BEHAVIOUR):
            groups = [sampled_by(behaviour, group) for group in GROUPS]
            (gradient,), metrics = await run_of(groups, **settings)
            gradients.setdefault(name, []).append(gradient)
            assert metrics["train/train_rollout_kl_k3"] > 0.03
            assert metrics["train/train_rollout_ess"] < 0.95
    np.testing.assert_array_equal(*gradients["none"])
    assert not np.allclose(*gradients["tis"], rtol=0.05)
    assert metrics["train/tis_clipfrac"] > 0.1


async def test_proximal_is_the_policy_before_the_first_of_several_updates():
    """Were it scored again before each step, each ratio would be 1 and nothing would be clipped."""
    groups = [sampled_by(BEHAVIOUR, group) for group in GROUPS]
    gradients, _ = await run_of(groups, 3, **EXACT, eps_clip=1e-3, eps_clip_high=1e-3)
    right, wrong = (
        expected_gradients(3, lambda ratio: ratio, eps=(1e-3, 1e-3), is_scored_again=again)
        for again in (False, True)
    )
    assert_close(gradients, right)
    np.testing.assert_allclose(gradients[0], wrong[0], rtol=1e-4, atol=1e-7)
    assert not any(np.allclose(a, b, rtol=0.01) for a, b in zip(gradients[1:], wrong[1:], strict=True))


@pytest.mark.parametrize("num_steps", STEPS)
async def test_tokens_before_an_update_leave_the_loss_and_count_in_its_denominators(num_steps):
    groups = [sampled_by(BEHAVIOUR, group) for group in GROUPS]
    gradients, metrics = await run_of(groups, num_steps, **EXACT, mask_offpolicy_in_partial_rollout=True)
    expected = expected_gradients(num_steps, lambda ratio: ratio, kept=is_later)
    assert_close(gradients, expected)
    assert 0.2 < metrics["train/mask_offpolicy_fraction"] < 0.6


@pytest.mark.parametrize("num_steps", STEPS)
async def test_staleness_is_relative_to_the_served_version_in_every_optimizer_step(num_steps):
    loop = loop_of([sampled_by(BEHAVIOUR, group) for group in GROUPS], num_steps, **EXACT)
    await loop.iterate(0)
    assert loop.trainer.served == [5] * num_steps
    assert loop.version == 6


async def test_gauges_of_a_batch_by_staleness_and_none_in_a_synchronous_run():
    groups = [
        sampled_by(BEHAVIOUR, group, versions=versions)
        for group, versions in zip(
            GROUPS, [(3, 4), (2, 2), (5, 5), (1, 1), (4, 4), (0, 5), (1, 3)], strict=True
        )
    ]
    _, metrics = await run_of(groups, **EXACT)
    bins = {name.split("/")[1] for name in metrics if name.startswith("train/staleness_")}
    # b, d and f have no signal: none of their tokens is scored, and all of them are in `rollout/`.
    assert bins == {f"staleness_{name}" for name in ("0", "1", "2", "3+")}
    assert sum(metrics[f"train/{name}/share"] for name in bins) == pytest.approx(1)
    ages = list(
        chain.from_iterable(
            [5 - v for turn in turns_of(episode) for v in turn.completion.versions.tolist()]
            for group in groups
            for episode in group.episodes
        )
    )
    assert metrics["rollout/staleness/mean"] == pytest.approx(np.mean(ages))
    assert metrics["rollout/staleness/max"] == max(ages) == 5
    _, synchronous = await run_of(
        [sampled_by(BEHAVIOUR, group) for group in GROUPS], max_staleness=None, **EXACT
    )
    assert not [name for name in synchronous if "staleness" in name or "offpolicy" in name]
