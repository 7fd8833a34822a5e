"""Means that begin anew with the first step of each iteration, against AdamW by hand in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentrl.algorithms.config import AlgorithmConfig
from tests.run.test_whole_step import GROUPS, run_of
from tests.trainer.tiny import batch, gradients_of, qwen3, trainer

BETAS = (0.8, 0.9)
RATE = 1e-2


@pytest.mark.parametrize("changes", [{}, {"optimizer_cpu_offload": True}], ids=["device", "CPU"])
async def test_a_step_after_them_is_a_first_step(changes):
    model = qwen3(torch.float32)
    options = {"lr": RATE, "weight_decay": 0.1, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}
    learner = trainer(model, **options, **changes)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    means, count = {}, 0
    for number, resets in enumerate([False, False, True, False, True]):
        if resets:
            means, count = {}, 0
        count += 1
        with gradients_of(model) as gradients:
            await learner.update(replace(batch(number), resets_optimizer=resets))
        for name, gradient in gradients.items():
            first, second = means.get(name, (0.0, 0.0))
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient.double()
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient.double() ** 2
            means[name] = first, second
            change = (first / (1 - BETAS[0] ** count)) / ((second / (1 - BETAS[1] ** count)).sqrt() + 1e-8)
            decay = 0.1 if gradient.ndim == 2 else 0.0
            weights[name] = weights[name] * (1 - RATE * decay) - RATE * change
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-5, atol=1e-6)


async def test_muons_mean_begins_anew_too():
    models = [qwen3(torch.float32), qwen3(torch.float32)]
    learners = [trainer(model, optimizer="muon", lr=RATE) for model in models]
    await learners[0].update(batch(1))
    models[0].load_state_dict(models[1].state_dict())
    for learner in learners:
        await learner.update(replace(batch(0), resets_optimizer=True))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("resets", [True, False])
async def test_it_is_the_first_step_of_each_iteration(resets):
    loop = replace(run_of(AlgorithmConfig(ppo_epochs=2), 2, (GROUPS, GROUPS)), resets_optimizer=resets)
    seen, update = [], loop.trainer.update

    async def noted(train_batch):
        seen.append(train_batch.resets_optimizer)
        return await update(train_batch)

    loop.trainer.update = noted
    for step in range(2):
        await loop.iterate(step)
    assert seen == [resets, False, False, False] * 2
