"""A network, its loss and its optimizer: one step over a batch, however it is cut into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.losses import Loss, LossInputs, TokenExtra, TokenOutputs
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.attention import segment_attention
from agentrl.trainer.torch.batch import MicroBatch, micro_batches
from agentrl.trainer.torch.optimizers import Optimizer, learning_rate
from agentrl.types import FloatArray, TrainBatch

Forward = Callable[[PreTrainedModel, MicroBatch], TokenOutputs]


class Learner:
    """Trains `network` in place.

    forward: what it says of the tokens of a row. total_steps: that a decay of the rate is spread over.
    """

    def __init__(
        self, network: PreTrainedModel, forward: Forward, loss: Loss, config: TrainerConfig, total_steps: int
    ) -> None:
        network.eval()
        self.network = network
        self._forward = forward
        self._loss = loss
        self._config = config
        self._total_steps = total_steps
        self._optimizer = Optimizer(network, config)
        self._step = 0
        self._skipped = 0

    def learn(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step: gradients of every micro-batch add up, then clip, then step.

        A gradient that is not finite is thrown away: weights and optimizer stay as they were,
        skipped_steps (in all so far) grows by one, and the schedule goes on.

        Returns:
            loss, grad_norm, lr, skipped_steps, and the loss's metrics as means over tokens.
        """
        lr = learning_rate(self._config, self._step, self._total_steps)
        self.network.zero_grad()
        sums = self._backward(batch)
        parameters = self.network.parameters()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm=self._config.clip_grad))
        if math.isfinite(grad_norm):
            self._optimizer.step(lr)
        else:
            self._skipped += 1
        self.network.zero_grad()
        self._step += 1
        means = {name: total / batch.num_loss_tokens for name, total in sums.items() if name != "loss"}
        told = {"loss": sums["loss"], "grad_norm": grad_norm, "lr": lr}
        return {**means, **told, "skipped_steps": float(self._skipped)}

    def _backward(self, batch: TrainBatch) -> Mapping[str, float]:
        """Leave the gradient of the whole batch in the parameters; return loss and metrics as sums."""
        masks = [sample.loss_mask for sample in batch.samples]
        total: Tensor | None = None
        names: list[str] = []
        with segment_attention(self.network):
            for row in micro_batches(batch.samples, masks, self._config.max_tokens_per_gpu):
                outputs = self._forward(self.network, row)
                loss, metrics = self._loss(outputs, loss_inputs(row, batch, self.network.device))
                loss.backward()
                names = ["loss", *metrics]
                sums = torch.stack([loss.detach(), *metrics.values()]).double()
                total = sums if total is None else total + sums
        values = [] if total is None else total.tolist()
        return dict(zip(names, values, strict=True))


def loss_inputs(row: MicroBatch, batch: TrainBatch, device: torch.device) -> LossInputs:
    """What is known of the row's tokens."""

    def tensor(arrays: Sequence[FloatArray]) -> Tensor:
        return torch.from_numpy(row.gather(arrays)).to(device)

    def given(arrays: Sequence[FloatArray] | None) -> Tensor | None:
        return None if arrays is None else tensor(arrays)

    counts = torch.tensor([len(at) for at in row.positions])
    return LossInputs(
        old_logp_N=tensor(batch.scores.old),
        rollout_logp_N=tensor([sample.logprobs for sample in batch.samples]),
        advantages_N=tensor(batch.credit.advantages),
        weights_N=tensor(batch.credit.weights),
        sequence_N=torch.repeat_interleave(torch.arange(len(counts)), counts).to(device),
        ref_logp_N=given(batch.scores.ref),
        returns_N=given(batch.credit.returns),
        old_values_N=given(batch.scores.values),
        extras={name: TokenExtra.of(extra, device) for name, extra in row.extras(batch.samples).items()},
    )
