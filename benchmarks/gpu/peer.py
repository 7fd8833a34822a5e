"""transformers on the same rows: bf16, variable-length attention, a fused AdamW over fp32 copies.

It is what a good loop without this package would do; nothing of a trainer of ours runs in it but the packing
of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from agentrl.trainer.batch import MicroBatch, micro_batches
from agentrl.types import TrainBatch
from benchmarks.gpu import card

_CHUNK = 2048
_VARLEN = "agentrl-varlen"


class _Bounds(NamedTuple):
    """The sequences of a row. ends_B: cumulative lengths, on the device."""

    lengths: tuple[int, ...]
    ends_B: Tensor


class Peer:
    """A causal language model of transformers and its optimizer on one device.

    row_tokens: of a micro-batch. recompute: layers in the backward pass. rows: the packed batch.
    """

    def __init__(self, path: Path, batch: TrainBatch, row_tokens: int, device: str, recompute: bool) -> None:
        self._device = torch.device(device)
        self._bounds: _Bounds | None = None
        self.attention = (
            "torch's FlashAttention, variable length" if device == "cuda" else "sdpa, by sequence"
        )
        AttentionInterface.register(_VARLEN, self._attend)
        model = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, dtype=torch.bfloat16, attn_implementation=_VARLEN
        )
        nn.Module.to(model, self._device)
        self._model = model.train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._mains: list[Tensor] = [p.detach().float().requires_grad_() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._mains, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
        )
        self.rows = micro_batches(batch.samples, [s.loss_mask for s in batch.samples], row_tokens)
        self._credit = [
            (
                torch.from_numpy(row.gather(batch.credit.advantages)),
                torch.from_numpy(row.gather(batch.credit.weights)),
            )
            for row in self.rows
        ]

    def update(self) -> float:
        """One optimizer step; the norm of the gradient."""
        for row, (advantages, weights) in zip(self.rows, self._credit, strict=True):
            logp = self._logprobs(row)
            ratio = torch.exp(logp - logp.detach())
            loss = -(advantages.to(self._device) * ratio * weights.to(self._device)).sum()
            loss.backward()
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
    def score(self) -> list[Tensor]:
        """The logprobs of all rows, each [N]."""
        logprobs = [self._logprobs(row) for row in self.rows]
        card.synchronize()
        return logprobs

    def _logprobs(self, row: MicroBatch) -> Tensor:
        """[N]: of the row's predicted tokens, in chunks whose logits the backward pass computes again."""
        ends = np.cumsum([0, *row.lengths]).astype(np.int32)
        self._bounds = _Bounds(row.lengths, torch.from_numpy(ends).to(self._device))
        ids, positions, predictor, targets = (
            torch.from_numpy(array).to(self._device, non_blocking=True)
            for array in (row.input_ids_T, row.position_ids_T, row.predictor_N, row.targets_N)
        )
        states = self._model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        hidden = states.last_hidden_state[0].index_select(0, predictor)
        parts = [
            checkpoint(self._of_chunk, *chunk, use_reentrant=False)
            if torch.is_grad_enabled()
            else self._of_chunk(*chunk)
            for chunk in zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True)
        ]
        return torch.cat(parts)

    def _of_chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden, self._model.lm_head.weight).float()
        return -nn.functional.cross_entropy(logits, targets, reduction="none")

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """Causal attention inside each sequence. query, key, value: [1, heads, T, width]."""
        del module, mask, unused
        assert self._bounds is not None, "the bounds of a row are known before its pass"
        if self._device.type == "cuda":
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            ends, longest = self._bounds.ends_B, max(self._bounds.lengths)
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=scaling
            )[0]
            return out[None], None
        parts = [
            nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=True
            )
            for q, k, v in zip(
                *(x.split(self._bounds.lengths, dim=2) for x in (query, key, value)), strict=True
            )
        ]
        return torch.cat(parts, dim=2).transpose(1, 2), None
