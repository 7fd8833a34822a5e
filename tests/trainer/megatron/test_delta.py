"""The gated delta rule over packed rows is its recurrence in float64, token by token and sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, pad

from agentrl.trainer.megatron.model.delta import convolved_within, gated_delta_rule
from agentrl.trainer.megatron.model.rows import gathered_places, pieces_of

GROUPS, TIMES, KEYS, VALUES = 2, 3, 5, 4


def recurrence(query, key, value, decay, beta):
    """The formula itself: [n, G, R, L, V]."""
    state = torch.zeros(*value.shape[:3], KEYS, VALUES, dtype=torch.float64)
    reads = []
    for t in range(value.shape[3]):
        q, k = query[:, :, :, t, :, None], key[:, :, :, t, :, None]
        state = decay[..., t, None, None].exp() * state
        error = value[..., t, :] - (k * state).sum(-2)
        state = state + k * (beta[..., t, None] * error)[..., None, :]
        reads.append((q * state).sum(-2))
    return torch.stack(reads, 3)


def inputs(length: int, forgets: float) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = [(1, length, KEYS), (1, length, KEYS), (TIMES, length, VALUES), (TIMES, length), (TIMES, length)]
    query, key, value, decay, beta = (
        torch.randn(2, GROUPS, *shape, generator=draw, dtype=torch.float64) for shape in shapes
    )
    key = key / key.norm(dim=-1, keepdim=True)
    return [x.requires_grad_() for x in (query, key, value, -forgets * decay.exp(), beta.sigmoid())]


# As long as a chunk, one token more or less, and several chunks.
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("forgets", [0.01, 20.0])
def test_chunks_give_what_the_recurrence_gives_and_its_gradient(length, forgets):
    given = [x.detach().requires_grad_() for x in inputs(length, forgets)]
    expected = recurrence(*given)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of_expected = torch.autograd.grad((weight * expected).sum(), given)
    result = gated_delta_rule(*given)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)
    for gradient, other in zip(torch.autograd.grad((weight * result).sum(), given), of_expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-9)


def test_each_sequence_is_convolved_by_itself():
    lengths, taps, channels = (7, 1, 2, 9), 4, 6
    draw = torch.Generator().manual_seed(0)
    row = torch.randn(sum(lengths), channels, generator=draw, dtype=torch.float64)
    weight = torch.randn(channels, 1, taps, generator=draw, dtype=torch.float64)
    expected = [
        conv1d(pad(part.T, (taps - 1, 0))[None], weight, groups=channels)[0].T for part in row.split(lengths)
    ]
    torch.testing.assert_close(convolved_within(row, weight, lengths), torch.cat(expected))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_token_has_its_place_among_those_of_all_context_ranks(ranks):
    lengths = (12 * ranks, 2 * ranks, 4 * ranks)
    starts = np.cumsum((0, *lengths[:-1]))
    gathered = np.concatenate(
        [
            start + pieces_of(length, ranks, rank)
            for rank in range(ranks)
            for start, length in zip(starts, lengths, strict=True)
        ]
    )
    np.testing.assert_array_equal(gathered[gathered_places(lengths, ranks)], np.arange(sum(lengths)))
