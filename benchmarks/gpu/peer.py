"""transformers on the same rows: bf16, variable-length attention, a fused AdamW over fp32 copies.

It is what a good loop without this package would do; nothing of a trainer of ours runs in it but the packing
of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from agentrl.trainer.batch import MicroBatch, micro_batches
from agentrl.types import Sample, TrainBatch
from benchmarks.gpu import card
from benchmarks.gpu.varlen import Bounds, attend

_CHUNK = 2048
_VARLEN = "agentrl-varlen"


class Peer:
    """A causal language model of transformers and its optimizer on one device.

    rows: tokens of a micro-batch. recompute: layers in the backward pass.
    """

    def __init__(self, path: Path, batch: TrainBatch, rows: int, device: str, recompute: bool) -> None:
        self._device = torch.device(device)
        self._bounds: Bounds | None = None
        self.attention = "torch, variable length" if device == "cuda" else "sdpa, by sequence"
        AttentionInterface.register(_VARLEN, self._attend)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation=_VARLEN
        )
        nn.Module.to(model, self._device)
        self._model = model.train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._mains = [p.detach().float().requires_grad_() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._mains, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
        )
        self._rows = micro_batches(batch.samples, [s.loss_mask for s in batch.samples], rows)
        self._credit = [
            (torch.from_numpy(row.gather(batch.credit.advantages)), torch.from_numpy(row.gather(batch.credit.weights)))
            for row in self._rows
        ]

    def update(self) -> float:
        """One optimizer step; the norm of the gradient."""
        for row, (advantages, weights) in zip(self._rows, self._credit, strict=True):
            logp = self._logprobs(row)
            ratio = torch.exp(logp - logp.detach())
            loss = -(advantages.to(self._device) * ratio * weights.to(self._device)).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        for parameter, main in zip(self._parameters, self._mains, strict=True):
            assert parameter.grad is not None, "every parameter has a part in the loss"
            main.grad, parameter.grad = parameter.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self._mains, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._mains)
        self._optimizer.zero_grad(set_to_none=True)
        card.synchronize()
        return float(norm)

    @torch.no_grad()
    def score(self) -> None:
        """The logprobs of all rows."""
        for row in self._rows:
            self._logprobs(row)
        card.synchronize()
