"""A teacher with a privileged prompt, against float64 of the extended sequence, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.errors import UserError
from agentrl.trainer.teacher import TrainerTeacher
from agentrl.trainer.torch import AuxiliaryModels
from agentrl.types import Author
from tests.algorithms.test_distillation import row_of
from tests.trainer.test_roles import trainer
from tests.trainer.tiny import VOCAB, llama, qwen3

W, P = Author.WORLD, Author.POLICY
ROWS = ([W, W, P, P, W, P], [W, P], [W, W, W, P, W, W, P, P], [W, W])
PRIVILEGED = ([3, 1, 4, 1, 5], None, [9], [2, 6])


def samples_in(rng):
    """Samples with prompts that the teacher reads longer, shorter or alike, at two temperatures."""
    drawn = []
    for authors, privileged in zip(ROWS, PRIVILEGED, strict=True):
        ids = rng.integers(0, VOCAB, len(authors)).astype(np.int32)
        drawn.append(row_of(authors, privileged, token_ids=ids))
    return drawn


def exact(model, sample):
    """log p of each sampled token after the privileged prompt and all tokens before it; NaN elsewhere."""
    start = next((t for t, author in enumerate(sample.author) if author == P), len(sample))
    prompt = sample.token_ids[:start] if sample.privileged_ids is None else sample.privileged_ids
    scores = np.full(len(sample), np.nan)
    for t in range(start, len(sample)):
        if sample.author[t] == P:
            context = [*prompt.tolist(), *sample.token_ids[start:t].tolist()]
            with torch.no_grad():
                logits = model(torch.tensor([context])).logits[0, -1] / float(sample.temperatures[t])
            scores[t] = torch.log_softmax(logits, 0)[sample.token_ids[t]].item()
    return scores


@pytest.mark.parametrize("role", ["old", "ref", "teacher"])
async def test_its_logprobs_are_those_of_float64_after_its_own_prompt(role):
    networks = {"old": qwen3(), "ref": qwen3(), "teacher": llama()}
    with torch.no_grad():
        for parameter in networks["ref"].parameters():
            parameter.mul_(1.3)
    auxiliary = AuxiliaryModels(ref=networks["ref"], teacher=networks["teacher"])
    samples = samples_in(np.random.default_rng(5))
    scored = await TrainerTeacher(role, 64).logprobs(samples, trainer(networks["old"], auxiliary=auxiliary))
    for sample, ours in zip(samples, scored, strict=True):
        expected = exact(networks[role], sample)
        assert ours.shape == expected.shape
        sampled = ~np.isnan(expected)
        np.testing.assert_allclose(ours[sampled], expected[sampled], atol=1e-5)


async def test_a_privileged_prompt_that_leaves_no_room_is_one_sentence():
    samples = samples_in(np.random.default_rng(5))
    with pytest.raises(
        UserError, match="has 9 tokens, 5 of them its privileged prompt, and a row may have 8"
    ):
        await TrainerTeacher("old", 8).logprobs(samples, trainer(qwen3()))
