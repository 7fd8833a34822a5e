"""The memory of scores over a large vocabulary, forward and backward: in chunks, against all logits in fp32.

Both are counted over tensors without numbers (`agentrl.trainer.torch.peak`): all logits of 32k tokens would
not fit into the memory of the machine. States, head and their gradients are on both sides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear, log_softmax

from agentrl.losses import OutputHead, Targets, logprobs_and_entropy
from agentrl.trainer.torch.peak import Storages
from benchmarks.sections import ResultRow
from benchmarks.trainer.context import TrainerContext

_Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
_TARGET = 8.0


async def bench_memory(context: TrainerContext) -> list[ResultRow]:
    """The peak of each way, for bfloat16 states."""
    chunked, naive = peak(_chunked, context.bench.head), peak(_naive, context.bench.head)
    tokens, _, vocabulary = context.bench.head
    line = (
        f"{naive / chunked:.1f}x less ({chunked / 2**30:.2f} GiB against {naive / 2**30:.2f} GiB, {tokens:,} "
        f"tokens x {vocabulary:,}), target {_TARGET}x"
    )
    context.on_event(f"memory: {line}")
    figures = {"ratio": naive / chunked, "target": _TARGET, "chunked_bytes": chunked, "naive_bytes": naive}
    return [ResultRow("memory", line, {**figures, "head": [*context.bench.head]})]


def peak(scores: _Scores, head: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> int:
    """Most bytes that are held at once beside states and head; head: tokens, width and vocabulary.

    What an operation takes for itself while it computes is not counted.
    """
    tokens, width, vocabulary = head
    with FakeTensorMode():
        states = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocabulary, width, dtype=dtype, requires_grad=True)
        ids = torch.zeros(tokens, dtype=torch.int64)
        storages = Storages([states, weight, ids])
        with storages:
            torch.autograd.backward(scores(states, weight, ids).sum())
    return storages.peak


def _chunked(states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return logprobs_and_entropy(states, OutputHead(weight), Targets(ids, torch.ones(len(ids)))).logp_N


def _naive(states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """As it is written in most loops; the entropy is computed without a gradient."""
    logp_NV = log_softmax(linear(states, weight).float(), -1)
    with torch.no_grad():
        (logp_NV.exp() * logp_NV).sum(-1)
    return logp_NV.gather(-1, ids[:, None])[:, 0]
