"""The sampler draws what it should, and its noise is a function of only seed and index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentrl.engine.embedded import sampler
from agentrl.engine.embedded.sampler import Rules, uniform


def sample(logits: torch.Tensor, rules: Rules) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The sampler overwrites its logits; tests need theirs again."""
    tokens, logprobs, kept = sampler.sample(logits.clone(), rules)
    assert not kept
    return tokens, logprobs


def rules(
    size: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, keeps: bool = False
) -> Rules:
    return Rules(
        np.full(size, temperature, np.float32),
        np.full(size, top_p, np.float32),
        np.full(size, top_k, np.int64),
        np.arange(size, dtype=np.uint64),
        np.zeros(size, np.uint64),
        np.full(size, keeps),
    )


def test_uniform_numbers_fill_the_interval_and_do_not_repeat() -> None:
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), indices.ravel())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers.tolist())) == numbers.size
    counts, _ = np.histogram(numbers, 50, (0, 1))
    # Chi-square with 49 degrees of freedom: 85 is the 0.999 quantile.
    assert ((counts - 1800) ** 2 / 1800).sum() < 85


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 3), (0.9, 4), (0.85, 3)])
def test_frequencies_are_the_models(temperature: float, top_p: float, top_k: int) -> None:
    size = 40_000
    logits = np.array([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0])
    tokens, logprobs = sample(
        torch.tensor(logits, dtype=torch.float32).expand(size, -1),
        rules(size, temperature=temperature, top_p=top_p, top_k=top_k),
    )
    probs = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    np.testing.assert_allclose(logprobs, np.log(probs)[tokens], atol=1e-5)
    order = np.argsort(-probs)
    kept = [int(token) for token in order[: top_k or len(probs)]]
    # Both count in the whole distribution. At (0.85, 3), one after the other would keep a token less.
    while probs[kept[:-1]].sum() > top_p:
        kept.pop()
    expected = np.zeros_like(probs)
    expected[kept] = probs[kept] / probs[kept].sum()
    counts = np.bincount(tokens, minlength=len(probs))
    assert set(np.flatnonzero(counts).tolist()) == set(kept)
    spread = np.sqrt(size * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - size * expected) / spread)[kept].max() < 4.5


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one() -> None:
    logits = torch.randn(50, 11, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, rules(50, temperature=0.0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, logits.log_softmax(-1).max(-1).values.numpy(), atol=1e-6)


def test_a_row_does_not_see_its_neighbours() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    mixed = Rules(
        np.array([0, 1, 0.5, 1, 1, 2], np.float32),
        np.array([1, 1, 0.5, 1, 0.9, 1], np.float32),
        np.array([0, 0, 0, 2, 3, 0], np.int64),
        np.arange(6, dtype=np.uint64) * 1000,
        np.arange(6, dtype=np.uint64),
        np.zeros(6, np.bool_),
    )
    tokens, logprobs = sample(logits, mixed)
    for n in range(6):
        fields = (mixed.temperature, mixed.top_p, mixed.top_k, mixed.seeds, mixed.indices, mixed.keeps)
        token, logprob = sample(logits[n : n + 1], Rules(*(array[n : n + 1] for array in fields)))
        assert token[0] == tokens[n]
        assert logprob[0] == pytest.approx(logprobs[n], abs=1e-6)


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.full((5_000, 8), float("-inf"))
    logits[:, 3] = 0.0
    tokens, logprobs = sample(logits, rules(5_000))
    assert set(tokens.tolist()) == {3}
    assert set(logprobs.tolist()) == {0.0}


@pytest.mark.parametrize("size", [1024, 1025, 4000])
def test_large_vocabularies_are_drawn_from_by_block_and_by_token(size: int) -> None:
    """A vocabulary that is, and one that is not, a multiple of the block; mass in few places."""
    draws = 30_000
    logits = np.full(size, -40.0)
    places = [0, 127, 128, 700, size - 1]
    logits[places] = [1.0, 0.0, 2.0, 1.5, 0.5]
    tokens, logprobs = sample(torch.tensor(logits, dtype=torch.float32).expand(draws, -1), rules(draws))
    probs = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(logprobs, np.log(probs)[tokens], atol=1e-5)
    counts = np.bincount(tokens, minlength=size)[places]
    assert counts.sum() == draws
    spread = np.sqrt(draws * probs[places] * (1 - probs[places]))
    assert (np.abs(counts - draws * probs[places]) / spread).max() < 4.5


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 3), (0.85, 3), (1e-6, 0), (1.0, 1)])
def test_kept_ids_are_what_can_be_drawn_and_logprobs_are_of_them(top_p: float, top_k: int) -> None:
    size, logits = 4_000, np.array([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0])
    drawn = sampler.sample(
        torch.tensor(logits, dtype=torch.float32).repeat(size, 1),
        rules(size, top_p=top_p, top_k=top_k, keeps=True),
    )
    plain, _ = sample(
        torch.tensor(logits, dtype=torch.float32).expand(size, -1), rules(size, top_p=top_p, top_k=top_k)
    )
    assert drawn.tokens.tolist() == plain.tolist()
    (ids,) = {tuple(ids.tolist()) for ids in drawn.kept.values()}
    assert set(ids) == set(plain.tolist())
    pi = np.exp(logits[list(ids)]) / np.exp(logits[list(ids)]).sum()
    expected = dict(zip(ids, np.log(pi), strict=True))
    np.testing.assert_allclose(drawn.logprobs, [expected[token] for token in plain.tolist()], atol=1e-6)
    if len(ids) == 1:
        assert set(drawn.logprobs.tolist()) == {0.0}


def test_only_rows_that_ask_have_kept_ids() -> None:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    asked = rules(4, top_k=3)
    asked.keeps[2] = True
    tokens, logprobs, kept = sampler.sample(logits.clone(), asked)
    plain, whole = sample(logits, rules(4, top_k=3))
    assert list(kept) == [2]
    assert sorted(kept[2].tolist()) == sorted(logits[2].topk(3).indices.tolist())
    assert tokens.tolist() == plain.tolist()
    assert logprobs[[0, 1, 3]].tolist() == whole[[0, 1, 3]].tolist()
    assert logprobs[2] > whole[2]
