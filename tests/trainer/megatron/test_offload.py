"""What rests holds no memory, and wakes up as it was."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron import offload
from agentrl.trainer.megatron.offload import Offloaded

PINNED_BYTES = 64


@pytest.fixture(autouse=True)
def small_pinned_buffers(monkeypatch):
    monkeypatch.setattr(offload, "PINNED_BYTES", PINNED_BYTES)


def drawn(*sizes):
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator) for size in sizes]


def held(tensors):
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def buffer_ids(sleeper):
    return {id(buffer) for buffer in sleeper._pinned}


def test_what_rests_holds_nothing_and_wakes_up_as_it_was():
    tensors, gradients = drawn(1, 16, 17, 100, 0), drawn(30)
    parts = [*tensors, tensors[3][:50], tensors[3][50:].view(5, 10)]
    expected = [tensor.clone() for tensor in parts]
    sleeper = Offloaded(lambda: parts, lambda: gradients)
    assert held([*parts, *gradients]) == [0] * 8
    ids = buffer_ids(sleeper)
    # One after the other, each once, and no gradients.
    assert len(ids) == -(-sum(4 * len(tensor) for tensor in tensors) // PINNED_BYTES)
    for change in (0.0, 1.0):
        with sleeper.onloaded():
            torch.testing.assert_close(parts, expected, atol=0, rtol=0)
            assert held(gradients) == [4 * 30]
            gradients[0].zero_()
            for tensor in (*tensors, *expected[:5]):
                tensor.add_(change)
            expected[5:] = [expected[3][:50], expected[3][50:].view(5, 10)]
    assert buffer_ids(sleeper) == ids
    with sleeper.onloaded():
        torch.testing.assert_close(parts, expected, atol=0, rtol=0)


def test_it_grows_with_what_an_optimizer_adds():
    tensors = drawn(16)
    sleeper = Offloaded(lambda: tensors)
    with sleeper.onloaded():
        tensors += drawn(3, 40)
        expected = [tensor.clone() for tensor in tensors]
    assert held(tensors) == [0, 0, 0]
    with sleeper.onloaded():
        torch.testing.assert_close(tensors, expected, atol=0, rtol=0)


def test_an_error_puts_it_to_rest_too():
    tensors = drawn(16)
    expected = tensors[0].clone()
    sleeper = Offloaded(lambda: tensors)
    with pytest.raises(RuntimeError, match="halfway"), sleeper.onloaded():
        raise RuntimeError("halfway")
    assert held(tensors) == [0]
    with sleeper.onloaded():
        assert torch.equal(tensors[0], expected)
