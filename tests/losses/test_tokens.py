import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.losses import LogitFinish, OutputHead, Targets, TokenOutputs, logprobs_and_entropy
from agentrl.types import Extra


def head(width: int, vocab: int) -> nn.Linear:
    torch.manual_seed(vocab)
    return nn.Linear(width, vocab, bias=False, dtype=torch.float64)


def as_they_are(vocab: int, dtype: torch.dtype = torch.float32) -> OutputHead:
    """A head whose logits are the hidden states."""
    return OutputHead(torch.eye(vocab, dtype=dtype))


def reference(logits: np.ndarray, targets: np.ndarray, temperature: np.ndarray):
    scaled = logits / temperature[:, None]
    shifted = scaled - scaled.max(1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    return np.log(p[np.arange(len(p)), targets]), -(p * np.log(p)).sum(1)


@given(number=st.integers(1, 9), vocab=st.integers(1, 7), max_logits=st.integers(1, 70))
def test_any_chunks_give_the_numbers_of_the_reference_and_one_gradient(number, vocab, max_logits):
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(number, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocab, (number,), generator=generator)
    temperature = torch.rand(number, generator=generator, dtype=torch.float64) + 0.5
    layer = head(3, vocab)

    unchunked = logprobs_and_entropy(states, OutputHead(layer.weight), Targets(targets, temperature))
    expected = torch.autograd.grad(unchunked.logp_N.square().sum(), [states, layer.weight])
    chunked = logprobs_and_entropy(
        states, OutputHead(layer.weight), Targets(targets, temperature), max_logits=max_logits
    )
    actual = torch.autograd.grad(chunked.logp_N.square().sum(), [states, layer.weight])

    logp, entropy = reference(layer(states).detach().numpy(), targets.numpy(), temperature.numpy())
    for outputs in (unchunked, chunked):
        np.testing.assert_allclose(outputs.logp_N.detach(), logp, atol=1e-12)
        np.testing.assert_allclose(outputs.entropy_N, entropy, atol=1e-12)
        assert not outputs.entropy_N.requires_grad
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@given(number=st.integers(1, 6), vocab=st.integers(2, 7), max_logits=st.integers(1, 40), cuts=st.booleans())
def test_a_cap_and_a_scale_are_those_of_the_formula(number, vocab, max_logits, cuts):
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(number, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocab, (number,), generator=generator)
    temperature = torch.rand(number, generator=generator, dtype=torch.float64) + 0.5
    layer, finish = nn.Linear(3, vocab, dtype=torch.float64), LogitFinish(scale=1.7, softcap=0.9)
    kept = None
    if cuts:
        # Of every token, the target and its neighbour.
        pairs = torch.stack([targets, (targets + 1) % vocab], 1)
        kept = Extra.of_lists([*pairs.to(torch.int32).numpy()])
    outputs = logprobs_and_entropy(
        *(states, OutputHead(layer.weight, layer.bias, finish=finish), Targets(targets, temperature, kept)),
        max_logits=max_logits,
        entropy_gradient=True,
    )
    capped = 0.9 * torch.tanh(1.7 * layer(states) / 0.9) / temperature[:, None]
    if cuts:
        capped = torch.full_like(capped, -torch.inf).scatter(1, pairs, capped.gather(1, pairs))
    logp = capped.log_softmax(1)
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(1)
    target = logp.gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(outputs.logp_N.detach(), target.detach(), atol=1e-12)
    np.testing.assert_allclose(outputs.entropy_N.detach(), entropy.detach(), atol=1e-12)
    learned = [states, layer.weight, layer.bias]
    actual = torch.autograd.grad((outputs.logp_N.square() + outputs.entropy_N).sum(), learned)
    expected = torch.autograd.grad((target.square() + entropy).sum(), learned)
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


class Counting(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))])
        return made


@given(number=st.integers(1, 9), vocab=st.integers(1, 7), max_logits=st.integers(1, 70))
def test_without_a_gradient_there_is_the_sum_of_squared_probabilities_too(number, vocab, max_logits):
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    targets, temperature = torch.zeros(number, dtype=torch.int64), torch.full((number,), 0.7).double()
    layer = head(3, vocab)
    with torch.no_grad():
        outputs = logprobs_and_entropy(
            states, OutputHead(layer.weight), Targets(targets, temperature), max_logits=max_logits
        )
        pi = np.exp(layer(states).numpy() / 0.7)
    pi /= pi.sum(1, keepdims=True)
    np.testing.assert_allclose(outputs.sum_pi_squared_N, (pi**2).sum(1), atol=1e-12)
    learning = logprobs_and_entropy(
        states, OutputHead(layer.weight), Targets(targets, temperature), max_logits=max_logits
    )
    assert learning.sum_pi_squared_N is None


def test_logits_are_never_all_there_at_once():
    weight = head(2, 300).weight
    states = torch.randn(100, 2, dtype=torch.float64, requires_grad=True)
    with Counting() as seen:
        outputs = logprobs_and_entropy(
            states,
            OutputHead(weight),
            Targets(torch.zeros(100, dtype=torch.int64), torch.ones(100)),
            max_logits=900,
        )
        outputs.logp_N.sum().backward()
    assert seen.most == 900


def test_half_precision_logits_meet_a_softmax_in_full():
    outputs = logprobs_and_entropy(
        torch.randn(4, 3, dtype=torch.bfloat16),
        OutputHead(torch.randn(50, 3, dtype=torch.bfloat16)),
        Targets(torch.zeros(4, dtype=torch.int64), torch.ones(4)),
    )
    assert outputs.logp_N.dtype == torch.float32


def test_a_certain_token_has_no_entropy_and_no_infinity():
    states = torch.tensor([[1e4, 0.0]], requires_grad=True)
    outputs: TokenOutputs = logprobs_and_entropy(
        states, as_they_are(2), Targets(torch.tensor([1]), torch.tensor([1.0]))
    )
    outputs.logp_N.sum().backward()
    assert outputs.logp_N.tolist() == [-1e4]
    assert outputs.entropy_N.tolist() == pytest.approx([0.0])
    assert torch.isfinite(states.grad).all()


@given(number=st.integers(1, 9), vocab=st.integers(1, 7), max_logits=st.integers(1, 70))
def test_asked_for_the_entropy_has_the_same_gradient_in_any_chunks(number, vocab, max_logits):
    generator = torch.Generator().manual_seed(number)
    states = torch.randn(number, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocab, (number,), generator=generator)
    temperature = torch.rand(number, generator=generator, dtype=torch.float64) + 0.5
    pull = torch.randn(number, generator=generator, dtype=torch.float64)
    layer = head(3, vocab)
    gradients = []
    for most in (10_000, max_logits):
        outputs = logprobs_and_entropy(
            states,
            OutputHead(layer.weight),
            Targets(targets, temperature),
            max_logits=most,
            entropy_gradient=True,
        )
        gradients.append(torch.autograd.grad((pull * outputs.entropy_N).sum(), [states, layer.weight]))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("max_logits", [10_000, 5])
def test_the_entropys_gradient_is_that_of_finite_differences(max_logits):
    logits = np.random.default_rng(2).normal(size=(4, 5))
    temperature = np.array([0.7, 1.0, 1.3, 1.0])
    pull = np.array([1.0, -2.0, 0.5, 3.0])
    targets = np.zeros(4, dtype=np.int64)
    leaf = torch.tensor(logits, requires_grad=True)
    outputs = logprobs_and_entropy(
        leaf,
        as_they_are(5, torch.float64),
        Targets(torch.tensor(targets), torch.tensor(temperature)),
        max_logits=max_logits,
        entropy_gradient=True,
    )
    (torch.tensor(pull) * outputs.entropy_N).sum().backward()
    for place in np.ndindex(4, 5):
        nudge = np.zeros_like(logits)
        nudge[place] = 1e-6
        up, down = (reference(logits + step, targets, temperature)[1] @ pull for step in (nudge, -nudge))
        assert float(leaf.grad[place]) == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("logits", [[1e4, 0.0, -1e4], [300.0, 0.0, 0.0], [2.0, 1.0, -math.inf]])
def test_a_forbidden_or_impossible_token_breaks_no_gradient_of_the_entropy(logits):
    # A bias of -inf forbids a token.
    states = torch.tensor([[max(value, -1e9) for value in logits]], requires_grad=True)
    bias = torch.tensor([0.0 if value > -math.inf else -math.inf for value in logits])
    outputs = logprobs_and_entropy(
        states,
        OutputHead(torch.eye(3), bias),
        Targets(torch.tensor([0]), torch.tensor([1.0])),
        entropy_gradient=True,
    )
    (outputs.entropy_N + outputs.logp_N).sum().backward()
    assert outputs.entropy_N.isfinite().all()
    assert states.grad.isfinite().all()
    allowed = [value for value in logits if value > -math.inf]
    logp = torch.log_softmax(torch.tensor(allowed, dtype=torch.float64), -1)
    assert float(outputs.entropy_N.detach()) == pytest.approx(
        float(torch.special.entr(logp.exp()).sum()), abs=1e-6
    )


def test_without_gradients_the_entropy_has_none_whatever_was_asked():
    with torch.no_grad():
        outputs = logprobs_and_entropy(
            torch.randn(3, 4, requires_grad=True),
            as_they_are(4),
            Targets(torch.zeros(3, dtype=torch.int64), torch.ones(3)),
            entropy_gradient=True,
        )
    assert not outputs.entropy_N.requires_grad
