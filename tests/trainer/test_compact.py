"""Matrices that do not learn take half of their memory, and not a bit of what is computed changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentrl.losses import ValueLoss
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels, Critic, critic_over, worker
from agentrl.trainer.torch.compact import compact
from agentrl.trainer.torch.frozen import freeze
from tests.trainer.families import family
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, qwen3, settings, trainer

ADAPTERS = {"bf16": True, "lora_rank": 2, "lora_target_modules": "all-linear", "lr": 1e-2}


def published_in_half(model):
    """Its weights rounded to bfloat16, in fp32, as those of most published models are read."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.float()


def every_role(name, own_ref=True, **options):
    """A policy, a critic, a teacher, and a reference: a network, or the policy without adapters."""
    model, ref, teacher = (published_in_half(family(name, seed=seed)) for seed in (3, 4, 5))
    config = settings(**options)
    freeze(model, config)
    critic = Critic(critic_over(model), Learning(ValueLoss(), config, 9))
    return trainer(model, auxiliary=AuxiliaryModels(critic, ref if own_ref else None, teacher), **options)


async def everything_of(learner):
    """Scores of all roles before and after two steps, and the weights that an engine would get."""
    rows = with_returns(batch())
    found = []
    for _ in range(2):
        scores = await learner.score(rows.samples, ("values", "ref", "teacher"))
        kinds = (scores.proximal, scores.values, scores.ref, scores.teacher)
        found += [torch.tensor(row) for kind in kinds for row in kind]
        await learner.update(rows)
    own = learner._worker
    return [*found, *(tensor for _, tensor in own._published(own.model))]


@pytest.mark.parametrize("own_ref", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "falcon_h1", "gpt2"])
async def test_every_number_is_the_same_as_with_whole_matrices(name, own_ref, monkeypatch):
    halved = await everything_of(every_role(name, own_ref, **ADAPTERS))
    monkeypatch.setattr(worker, "compact", lambda model, **_: None)
    whole = await everything_of(every_role(name, own_ref, **ADAPTERS))
    assert len(halved) == len(whole) > 20
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(halved, whole, strict=True))


def dtypes_of(model):
    """Of the matrices of linear layers, without the head."""
    head = model.get_output_embeddings()
    return [
        (module.weight.dtype, module.weight.requires_grad)
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def test_what_does_not_learn_is_in_half_and_what_learns_is_not():
    learner = every_role("qwen3", **ADAPTERS)._worker
    below = set(dtypes_of(learner.model))
    assert below == {(torch.bfloat16, False), (torch.float32, True)}
    assert set(dtypes_of(learner._auxiliary.critic.network)) == below
    for judge in (learner._auxiliary.ref, learner._auxiliary.teacher):
        assert {dtype for dtype, _ in dtypes_of(judge)} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{**ADAPTERS, "bf16": False}, {"bf16": True}])
def test_without_half_precision_or_adapters_the_policy_stays_whole(options):
    learner = every_role("qwen3", **options)._worker
    assert {dtype for dtype, _ in dtypes_of(learner.model)} == {torch.float32}


def test_a_reference_that_moves_stays_whole():
    auxiliary = AuxiliaryModels(ref=published_in_half(qwen3(torch.float32)), moves_reference=True)
    trainer(published_in_half(qwen3(torch.float32)), auxiliary=auxiliary, **ADAPTERS)
    assert {dtype for dtype, _ in dtypes_of(auxiliary.ref)} == {torch.float32}


def test_a_matrix_that_would_lose_a_number_stays_whole():
    model = published_in_half(qwen3(torch.float32))
    (rounded, *others) = (module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        rounded.weight[0, 0] = 1 + 2**-20
    compact(model, learns=False)
    assert rounded.weight.dtype == torch.float32
    assert all(other.weight.dtype == torch.bfloat16 for other in others[:-1])
    # The head is the embedding, whose output is added up in fp32.
    assert others[-1].weight is model.get_input_embeddings().weight
    assert others[-1].weight.dtype == torch.float32
