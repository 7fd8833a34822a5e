"""A step of ours against what a loop of one's own would do: padded batches, and nothing but the passes.

packed   long-tailed samples: rows of ours against batches that are padded to their longest sample
bare     samples of one length, which need no padding: our whole step against forward, backward and
         optimizer alone, with no loss but the mean logprob
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from agentrl.types import TrainBatch
from benchmarks.batches import batch_of
from benchmarks.compare import Side, rates
from benchmarks.models import vocab_size
from benchmarks.sections import ResultRow
from benchmarks.trainer.context import OURS, TrainerContext
from benchmarks.trainer.settings import long_tailed

_EQUAL = 256
_Row = npt.NDArray[np.int64] | npt.NDArray[np.float32]


async def bench_packed(context: TrainerContext) -> list[ResultRow]:
    """Rows against padded batches, of long-tailed samples."""
    bench = context.bench
    lengths = long_tailed(bench.episodes, bench.longest)
    batch = batch_of(lengths, vocab_size(context.model()))
    sides = {OURS: context.updating(batch), "padded": _padded(context, batch)}
    result = await rates(sides, sum(lengths), "tokens_per_s", repeats=bench.repeats)
    return [context.row("packed", result, 1.8, lengths=[*lengths])]


async def bench_bare(context: TrainerContext) -> list[ResultRow]:
    """A whole step against the passes and the optimizer, of samples of one length."""
    bench = context.bench
    lengths = [_EQUAL] * (2 * bench.padded)
    batch = batch_of(lengths, vocab_size(context.model()))
    sides = {OURS: context.updating(batch), "bare": _bare(context, batch)}
    result = await rates(sides, sum(lengths), "tokens_per_s", repeats=bench.repeats)
    return [context.row("bare", result, 0.9, lengths=[*lengths])]


def _padded(context: TrainerContext, batch: TrainBatch) -> Side:
    """The clipped surrogate over batches in the order of the samples, each padded to its longest."""
    size, number = context.bench.padded, len(batch.samples)
    parts = [slice(start, start + size) for start in range(0, number, size)]
    columns: dict[str, Sequence[_Row]] = {
        "ids": [sample.token_ids.astype(np.int64) for sample in batch.samples],
        "old": [sample.logprobs for sample in batch.samples],
        "advantages": batch.credit.advantages,
        "weights": batch.credit.weights,
    }
    padded = [{name: _filled(rows[part]) for name, rows in columns.items()} for part in parts]
    attended = [_filled([np.ones(len(s), np.int64) for s in batch.samples[part]]) for part in parts]

    def backward(model: PreTrainedModel) -> None:
        for rows, mask in zip(padded, attended, strict=True):
            logits = model(input_ids=rows["ids"], attention_mask=mask, use_cache=False).logits[:, :-1]
            logp = log_softmax(logits.float(), -1).gather(-1, rows["ids"][:, 1:, None])[..., 0]
            ratio = (logp - rows["old"][:, 1:]).exp()
            advantages = rows["advantages"][:, 1:]
            surrogate = torch.minimum(ratio * advantages, ratio.clip(0.8, 1.28) * advantages)
            (-(surrogate * rows["weights"][:, 1:]).sum()).backward()

    return _stepping(context, backward)


def _bare(context: TrainerContext, batch: TrainBatch) -> Side:
    """The mean logprob, over as many tokens at once as a row of ours has."""
    ids = torch.from_numpy(np.stack([sample.token_ids for sample in batch.samples]).astype(np.int64))
    parts = ids.split(max(context.bench.row_tokens // ids.shape[1], 1))

    def backward(model: PreTrainedModel) -> None:
        for rows in parts:
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()

    return _stepping(context, backward)


def _stepping(context: TrainerContext, backward: Callable[[PreTrainedModel], None]) -> Side:
    """A side that takes a step with the gradients that a function adds up."""
    model = context.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    async def step() -> None:
        optimizer.zero_grad()
        backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _filled(rows: Sequence[_Row]) -> Tensor:
    """[B, longest], with zeros after the end of each row."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row.copy()) for row in rows], batch_first=True)
