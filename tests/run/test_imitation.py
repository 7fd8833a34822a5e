"""The supervised loop: its order, its loss on held-out samples."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import sft_loss
from agentrl.run.imitation import held_out_loss, imitate, shuffled_batches
from tests.trainer.tiny import divisor, qwen3, sample, trainer


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 60), st.integers(0, 3))
def test_every_epoch_goes_through_all_numbers(n, batch_size, total, seed):
    batches = list(shuffled_batches(n, batch_size, seed=seed, total=total))
    numbers = [*chain.from_iterable(batches)]
    assert len(numbers) == total
    assert all(len(batch) == batch_size for batch in batches[:-1])
    counts = Counter(dict.fromkeys(range(n), 0) | Counter(numbers))
    assert max(counts.values()) - min(counts.values()) <= 1
    if batch_size == n:
        assert all(len(set(batch)) == len(batch) for batch in batches)


def test_the_order_depends_on_the_seed_and_differs_between_epochs():
    def of(seed):
        return list(shuffled_batches(30, 30, seed=seed, total=60))

    assert of(1) == of(1)
    assert of(1) != of(2)
    first, second = of(1)
    assert first != second


def test_a_warm_start_has_the_order_that_its_published_figures_have():
    shuffler = random.Random("warm start/7")
    order = []
    expected = []
    for _ in range(9):
        while len(order) < 4:
            epoch = list(range(10))
            shuffler.shuffle(epoch)
            order = epoch + order
        expected.append(order[-4:])
        order = order[:-4]
    assert list(shuffled_batches(10, 4, seed=7, total=36)) == expected


def samples(*masks):
    rng = np.random.default_rng(0)
    return [sample(rng, mask, f"s{i}") for i, mask in enumerate(masks)]


def oracle(model, data):
    """Minus the mean logprob of the loss tokens, one sample at a time, in float64."""
    logprobs = []
    with torch.no_grad():
        for one in data:
            ids = torch.from_numpy(one.token_ids.astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0] / divisor(one)
            table = torch.log_softmax(logits.double(), dim=-1)
            logprobs += [table[t - 1, ids[t]].item() for t in np.flatnonzero(one.loss_mask)]
    return -sum(logprobs) / len(logprobs)


MASKS = ([0, 0, 1, 1], [0, 1, 0, 0, 1, 1, 0], [0, 1], [0, 0, 0, 0, 1])


@pytest.mark.parametrize("batch_size", [1, 3, 10])
async def test_the_held_out_loss_is_the_mean_over_all_loss_tokens(batch_size):
    model, data = qwen3(), samples(*MASKS)
    loss = await held_out_loss(trainer(model, sft_loss), data, batch_size=batch_size)
    assert loss == pytest.approx(oracle(model, data), rel=1e-6)


async def test_the_loss_of_a_step_is_that_of_its_batch_before_the_step():
    model, data = qwen3(), samples(*MASKS)
    before = oracle(model, data)
    (report,) = [report async for report in imitate(trainer(model, sft_loss, lr=1e-3), [data])]
    assert report.metrics["train/loss"] == pytest.approx(before, rel=1e-6)
    assert oracle(model, data) < before
