import pytest
import torch

from agentrl.weights import checksum

A = torch.arange(12, dtype=torch.float32).reshape(3, 4)
B = torch.arange(12, 24, dtype=torch.float32).reshape(3, 4)


def test_order_does_not_matter():
    assert checksum([("a", A), ("b", B)]) == checksum([("b", B), ("a", A)])


@pytest.mark.parametrize(
    "other",
    [
        [("a", B), ("b", A)],
        [("a", A)],
        [("a", A), ("b", B), ("c", A)],
        [("a", A), ("c", B)],
        [("a", A.reshape(4, 3)), ("b", B)],
        [("a", A.view(torch.int32)), ("b", B)],
        [("a", A + torch.eye(3, 4) * 1e-6), ("b", B)],
    ],
    ids=["traded contents", "missing", "extra", "renamed", "reshaped", "other dtype", "other bits"],
)
def test_every_difference_shows(other):
    assert checksum(other) != checksum([("a", A), ("b", B)])


def test_it_is_a_64_bit_number_that_reproduces():
    number = checksum([("a", A), ("b", B)])
    assert 0 <= number < 2**64
    assert number == checksum([("a", A.clone()), ("b", B.clone())])
    assert number == checksum([("a", A.T.contiguous().T), ("b", B)])
