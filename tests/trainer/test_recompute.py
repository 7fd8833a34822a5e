"""Layers that are computed a second time: the same gradient, bit for bit, for a small part of the memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from agentrl.losses import PolicyLoss
from agentrl.trainer.loss_inputs import StepInputs
from tests.trainer.families import family
from tests.trainer.tiny import batch, gradients_of, trainer


async def step(name: str, **changes: bool) -> dict[str, torch.Tensor]:
    model = family(name)
    with gradients_of(model) as gradients:
        await trainer(model, PolicyLoss(), max_tokens_per_gpu=30, **changes).update(batch())
    return gradients


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3_moe", "falcon_h1"])
async def test_the_gradient_is_the_same_bit_for_bit(name):
    kept, recomputed = await step(name), await step(name, gradient_checkpointing=True)
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[key], recomputed[key]) for key in kept)


def kept_bytes(learner) -> int:
    """What a forward pass over a batch keeps for its backward pass, parameters left out."""
    network, train_batch, kept = learner._worker._policy.network, batch(), {}
    parameters = {p.untyped_storage().data_ptr() for p in network.model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    loss = learner._worker._policy
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss._backward(train_batch, StepInputs(train_batch))
    return sum(kept.values())


def test_a_small_part_of_the_activations_is_kept():
    """A layer keeps its input alone, which is one of some twenty tensors of that size."""
    whole, part = (
        kept_bytes(trainer(family("qwen3"), max_tokens_per_gpu=1000, gradient_checkpointing=recomputes))
        for recomputes in (False, True)
    )
    assert part < 0.5 * whole


async def test_scoring_is_as_it_was():
    samples = batch().samples
    plain = await trainer(family("qwen3")).score(samples)
    other = await trainer(family("qwen3"), gradient_checkpointing=True).score(samples)
    assert all((a == b).all() for a, b in zip(plain.proximal, other.proximal, strict=True))
