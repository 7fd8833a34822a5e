"""The reference `Trainer`. One process; no replay, no reference model, no value head."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.losses import Loss, LossInputs
from agentrl.protocols import PublishReport, StepReport, WeightSink
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.attention import segment_attention
from agentrl.trainer.torch.batch import MicroBatch, micro_batches
from agentrl.trainer.torch.checkpoint import save_model
from agentrl.trainer.torch.forward import check_trainable, token_outputs
from agentrl.trainer.torch.optimizers import Optimizer, learning_rate
from agentrl.types import FloatArray, Sample, ScoreRole, Scores, TrainBatch
from agentrl.weights import deliver, named_weights


class TorchTrainer:
    """Trains `model` in place.

    Its methods run on the caller's thread from start to end, so a task that is cancelled
    never leaves half a step behind. Dropout is off: the loss compares probabilities with
    those of an engine that has none.

    Args:
        model: a causal language model in fp32 with full attention.
        loss: the per-token loss, e.g. `policy_loss` or `sft_loss`.
        config: optimizer, schedule and size of micro-batches.
        tokenizer: saved beside the weights.
        total_steps: optimizer steps that a decay is spread over where lr_decay_iters is left out.

    Raises:
        ModelLoadError: the model cannot be trained in packed rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        config: TrainerConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        total_steps: int,
    ) -> None:
        model.eval()
        check_trainable(model)
        self._model = model
        self._loss = loss
        self._config = config
        self._tokenizer = tokenizer
        self._total_steps = total_steps
        self._optimizer = Optimizer(model, config)
        self._step = 0
        self._skipped = 0

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token under the current weights, at each sample's temperature.

        A first token has nothing before it and gets 0.
        """
        masks = [np.arange(len(sample)) > 0 for sample in samples]
        logprobs = [np.zeros(len(sample), dtype=np.float32) for sample in samples]
        with torch.no_grad(), segment_attention(self._model):
            for row in micro_batches(samples, masks, self._config.max_tokens_per_gpu):
                logp_N = token_outputs(self._model, row, bf16=self._config.bf16).logp_N.float().cpu().numpy()
                counts = [len(at) for at in row.positions]
                parts = np.split(logp_N, np.cumsum(counts)[:-1])
                for member, at, part in zip(row.members, row.positions, parts, strict=True):
                    logprobs[member][at] = part
        return Scores(old=tuple(logprobs))

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step: gradients of every micro-batch add up, then clip, then step.

        A gradient that is not finite is thrown away: weights and optimizer stay as they were,
        train/skipped_steps (in all so far) grows by one, and the schedule goes on.

        Raises:
            ValueError: no token of the batch is under a loss mask, or one was sampled greedily.
        """
        if not batch.num_loss_tokens:
            raise ValueError("no token of the batch is under the loss mask; leave the step out")
        lr = learning_rate(self._config, self._step, self._total_steps)
        self._model.zero_grad()
        sums = self._backward(batch)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=self._config.clip_grad)
        )
        if math.isfinite(grad_norm):
            self._optimizer.step(lr)
        else:
            self._skipped += 1
        self._model.zero_grad()
        self._step += 1
        means = {name: total / batch.num_loss_tokens for name, total in sums.items() if name != "loss"}
        metrics = {**means, "loss": sums["loss"], "grad_norm": grad_norm, "lr": lr}
        metrics["skipped_steps"] = float(self._skipped)
        return StepReport(
            {f"train/{name}": value for name, value in metrics.items()},
            sum(len(sample) for sample in batch.samples),
        )

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights, each piece of memory once, in buckets of 64 MiB."""
        started = time.perf_counter()
        num_bytes = await deliver(list(named_weights(self._model)), target, version)
        return PublishReport(version, num_bytes, time.perf_counter() - started)

    def save(self, directory: str) -> None:
        """Write model and tokenizer as a Hugging Face directory that appears whole or not at all."""
        save_model(self._model, self._tokenizer, directory)

    def _backward(self, batch: TrainBatch) -> Mapping[str, float]:
        """Leave the gradient of the whole batch in the parameters; return loss and metrics as sums."""
        masks = [sample.loss_mask for sample in batch.samples]
        total: Tensor | None = None
        names: list[str] = []
        with segment_attention(self._model):
            for row in micro_batches(batch.samples, masks, self._config.max_tokens_per_gpu):
                outputs = token_outputs(self._model, row, bf16=self._config.bf16)
                loss, metrics = self._loss(outputs, self._inputs(row, batch))
                loss.backward()
                names = ["loss", *metrics]
                sums = torch.stack([loss.detach(), *metrics.values()]).double()
                total = sums if total is None else total + sums
        values = [] if total is None else total.tolist()
        return dict(zip(names, values, strict=True))

    def _inputs(self, row: MicroBatch, batch: TrainBatch) -> LossInputs:
        def tensor(arrays: Sequence[FloatArray]) -> Tensor:
            return torch.from_numpy(row.gather(arrays)).to(self._model.device)

        return LossInputs(
            old_logp_N=tensor(batch.scores.old),
            rollout_logp_N=tensor([sample.logprobs for sample in batch.samples]),
            advantages_N=tensor(batch.credit.advantages),
            weights_N=tensor(batch.credit.weights),
        )
