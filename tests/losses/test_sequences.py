import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import sequence_mean

ragged = st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=7), min_size=1, max_size=5)


def flat(sequences) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor([x for own in sequences for x in own], dtype=torch.float64, requires_grad=True)
    index = torch.tensor([i for i, own in enumerate(sequences) for _ in own])
    return values, index


@given(ragged)
def test_every_token_gets_the_mean_of_its_own_sequence(sequences):
    values, index = flat(sequences)
    expected = [sum(own) / len(own) for own in sequences for _ in own]
    torch.testing.assert_close(sequence_mean(values, index), torch.tensor(expected, dtype=torch.float64))


@given(ragged, st.integers(0, 2**31))
def test_its_gradient_is_shared_by_the_sequence_alone(sequences, seed):
    values, index = flat(sequences)
    pull = torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (sequence_mean(values, index) * pull).sum().backward()
    start, expected = 0, []
    for own in sequences:
        expected += [float(pull[start : start + len(own)].sum()) / len(own)] * len(own)
        start += len(own)
    torch.testing.assert_close(values.grad, torch.tensor(expected, dtype=torch.float64))


def test_float64_stays_float64_and_nothing_stays_nothing():
    values = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert float(sequence_mean(values, torch.tensor([0, 0]))[0]) - 1.0 > 1e-13
    assert sequence_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
