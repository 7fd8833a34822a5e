"""What is fused on a GPU is one graph, of any number of tokens, and computes what it computes as it is."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from agentrl.losses import fused, gpu, tokens
from agentrl.trainer.megatron.model import delta, feed_forward, layers
from agentrl.trainer.megatron.model.shape import Gating

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def numbers(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def ids(count, most):
    return torch.arange(count) % most


CASES = {
    "sums": (
        tokens._sums,
        lambda n: (numbers(n, 11).detach(), 1 + numbers(n).detach() ** 2, ids(n, 11), True),
    ),
    "gradient": (
        tokens._gradient,
        lambda n: (numbers(n, 11).detach(), ids(n, 11), 1 + numbers(n, 6).detach() ** 2),
    ),
    "norm": (feed_forward._rms_norm, lambda n: (numbers(n, 1, 8), numbers(8), 1e-6, False)),
    "norm, from zero": (feed_forward._rms_norm, lambda n: (numbers(n, 1, 8), numbers(8), 1e-6, True)),
    "heads": (
        layers._heads_of,
        lambda n: (
            numbers(n, 2, 16),
            numbers(n, 2, 4).detach(),
            layers.Norms(numbers(4), numbers(4), 1e-6),
            4,
            False,
            False,
        ),
    ),
    "heads, pairs": (
        layers._heads_of,
        lambda n: (numbers(n, 2, 16), numbers(n, 2, 2).detach(), None, 4, True, False),
    ),
    "heads, gates": (
        layers._heads_of,
        lambda n: (numbers(n, 2, 24), numbers(n, 2, 2).detach(), None, 4, True, True),
    ),
    "gates of heads": (layers._gated, lambda n: (numbers(n, 1, 16), numbers(n, 2, 24), 4)),
    "gated norm": (delta._gated_norm, lambda n: (numbers(n, 2, 8), numbers(n, 2, 8), numbers(4), 1e-6)),
    "heads of the delta rule": (
        delta._heads_of,
        lambda n: (numbers(n, 2, 16), numbers(n, 2, 4), numbers(2, 2), numbers(2, 2), 4),
    ),
    "gated": (feed_forward.gated, lambda n: (numbers(n, 1, 12), Gating())),
}


def leaves_of(arguments):
    flat = [x for each in arguments for x in (each if isinstance(each, tuple) else (each,))]
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]


def run(function, arguments):
    """The outputs, and the gradient of their sum of squares."""
    given = tuple(x.clone() if isinstance(x, torch.Tensor) and not x.requires_grad else x for x in arguments)
    gpu.mark_tokens(given)
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = leaves_of(arguments)
    gradients = torch.autograd.grad(sum((x**2).sum() for x in outputs), leaves) if leaves else ()
    return [*outputs, *gradients]


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_graph_for_any_number_of_tokens(name):
    torch._dynamo.reset()
    function, arguments_for = CASES[name]
    plain, counter = function.__wrapped__, CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(plain, backend=counter, fullgraph=True)
    for count in (7, 5, 6, 23):
        arguments = arguments_for(count)
        for ours, expected in zip(run(compiled, arguments), run(plain, arguments), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


def test_on_a_cpu_nothing_is_compiled(monkeypatch):
    def compile_(*_, **__):
        raise AssertionError("it was compiled")

    monkeypatch.setattr(torch, "compile", compile_)
    assert fused(lambda x: x + 1)(torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    "error", [RuntimeError("no C compiler\nfound"), ImportError("no triton"), OSError("gcc")]
)
def test_where_nothing_can_be_compiled_it_is_said_once_and_all_runs_as_it_is(monkeypatch, caplog, error):
    def compile_(function, **_):
        def fails(*_):
            raise error

        return fails

    monkeypatch.setattr(torch, "compile", compile_)
    gpu.compiles.cache_clear()
    # A tensor of this machine stands for one of a GPU.
    assert not gpu.compiles(CPU)
    assert not gpu.compiles(CPU)
    gpu.compiles.cache_clear()
    assert caplog.text.count("cannot compile here: " + str(error).split("\n")[0]) == 1
