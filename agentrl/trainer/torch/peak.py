"""The most memory that a row takes on its way through a step, without any: tensors have shapes, no numbers.

Counted are the storages that the operations of the forward and the backward pass make, until they go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from agentrl.losses import OutputHead, Targets, logprobs_and_entropy
from agentrl.losses.tokens import max_logits_on
from agentrl.trainer.attention import Ends, Scoring, Sides
from agentrl.trainer.torch.forward import (
    Packing,
    UnpackableError,
    attends_everywhere,
    head_of,
    segment_attention,
)
from agentrl.trainer.torch.learner import recompute_layers

_EXPERTS = ".experts."


class RowJob(NamedTuple):
    """What is done with a row.

    bf16: matrices are multiplied in bfloat16. recomputes: layers are computed a second time. is_critic: the
    head has one output. gpu_bytes: memory of the GPU that it is done on, with FlashAttention and compiled
    kernels; None = a CPU.
    """

    bf16: bool = False
    recomputes: bool = False
    is_critic: bool = False
    gpu_bytes: int | None = None


class RowMemory:
    """What rows take in a step, beside weights, gradients and the optimizer's state.

    model: on torch's device `meta`, and this keeps it; what learns of it requires a gradient.
    """

    def __init__(self, model: PreTrainedModel, job: RowJob) -> None:
        self._job = job
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake:
            self._model = model.to_empty(device="cpu").eval()
            model.tie_weights()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
        if job.recomputes:
            recompute_layers(model)
        self._is_packed = attends_everywhere(model)

    def peak(self, tokens: int) -> int | None:
        """Most bytes that are held at once for a row of one sequence of so many tokens.

        None: an operation of the model tells nothing without numbers, as experts do, whose tokens depend on
        them.
        """
        if any(_EXPERTS in name for name, _ in self._model.named_parameters()):
            return None
        if self._is_packed:
            try:
                with segment_attention(self._model):
                    return self._peak(tokens)
            # As in `TorchNetwork`: what a model makes of arguments that it does not know.
            except (TypeError, RuntimeError, UnpackableError):
                self._is_packed = False
        try:
            return self._peak(tokens)
        except RuntimeError:
            return None

    def _peak(self, tokens: int) -> int:
        held = [*self._model.parameters(), *self._model.buffers()]
        held += [p.grad for p in self._model.parameters() if p.grad is not None]
        storages = Storages(held)
        with self._fake, storages:
            ids_T = torch.zeros(tokens, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16, enabled=self._job.bf16):
                states_TD = self._states(ids_T)
            torch.autograd.backward(self._scores(states_TD, ids_T).sum())
        return storages.peak

    def _states(self, ids_T: Tensor) -> Tensor:
        arguments: dict[str, object] = {"input_ids": ids_T[None], "use_cache": False}
        if self._is_packed:
            tokens = len(ids_T)
            arguments["position_ids"] = torch.arange(tokens)[None]
            ends = Ends(torch.tensor([0, tokens], dtype=torch.int32), (tokens,))
            has_flash = self._job.gpu_bytes is not None and self._job.bf16
            arguments["packing"] = Packing(ends, None, _flash if has_flash else None)
        states_TD: Tensor = self._model.base_model(**arguments).last_hidden_state[0]
        return states_TD

    def _scores(self, states_TD: Tensor, ids_T: Tensor) -> Tensor:
        head, bf16 = head_of(self._model), self._job.bf16
        if self._job.is_critic:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                values_T1: Tensor = head(states_TD)
            return values_T1.float()
        dtype = torch.bfloat16 if bf16 else head.weight.dtype
        weight_VD = head.weight.to(dtype)
        if self._job.gpu_bytes is not None:
            chunk = max(max_logits_on(self._job.gpu_bytes) // len(weight_VD), 1)
            return _head_of_a_gpu(states_TD.to(dtype), weight_VD, chunk)
        targets = Targets(ids_T, torch.ones(len(ids_T)))
        return logprobs_and_entropy(states_TD.to(dtype), OutputHead(weight_VD), targets).logp_N


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that operations make. held: tensors that do not count."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self._known = {tensor.untyped_storage()._cdata for tensor in held}
        self._bytes = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation, and count what it returns."""
        del types
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._bytes += storage.nbytes()
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, number: int, size: int) -> None:
        self._known.discard(number)
        self._bytes -= size


class _Kept(Protocol):
    """What torch passes from a forward pass to its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    chunk: int

    def save_for_backward(self, *tensors: Tensor) -> None:
        """These become `saved_tensors`."""


class _Flash(torch.autograd.Function):
    """FlashAttention by what it keeps: its inputs, its output, and a number for each query."""

    @staticmethod
    def forward(ctx: _Kept, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Kept, _d_out: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        # It adds up the gradient of the queries in fp32.
        torch.empty_like(query, dtype=torch.float32)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _HeadOfAGpu(torch.autograd.Function):
    """Scores of tokens by what a GPU's compiled kernels hold: the logits of a chunk, and their gradient."""

    @staticmethod
    def forward(ctx: _Kept, states_TD: Tensor, weight_VD: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(states_TD, weight_VD)
        ctx.chunk = min(chunk, len(states_TD))
        states_TD.new_empty((ctx.chunk, len(weight_VD)))
        return states_TD.new_empty(len(states_TD), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Kept, _d_logp_T: Tensor) -> tuple[Tensor, Tensor, None]:
        states_TD, weight_VD = ctx.saved_tensors
        d_states_TD = torch.empty_like(states_TD)
        # Of several chunks the gradients of the head are added up in fp32.
        sum_VD = torch.empty_like(weight_VD, dtype=torch.float32)
        logits_NV = states_TD.new_empty((ctx.chunk, len(weight_VD)))
        gradient_NV, share_VD = torch.empty_like(logits_NV), torch.empty_like(weight_VD)
        del logits_NV, gradient_NV, share_VD
        return d_states_TD, sum_VD.to(weight_VD.dtype), None


_of_flash: Callable[[Tensor, Tensor, Tensor], Tensor] = _Flash.apply
_head_of_a_gpu: Callable[[Tensor, Tensor, int], Tensor] = _HeadOfAGpu.apply


def _flash(query: Tensor, key: Tensor, value: Tensor, _sides: Sides, _scores: Scoring) -> Tensor:
    return _of_flash(query, key, value)
