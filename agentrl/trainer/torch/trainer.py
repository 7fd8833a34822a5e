"""The reference `Trainer`: one process, plain torch, a network for each role."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.checkpoints.saving import save_model
from agentrl.losses import Loss, extras_used
from agentrl.protocols import PublishReport, StepReport, WeightSink
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.attention import segment_attention
from agentrl.trainer.torch.batch import MicroBatch, check_extras, micro_batches
from agentrl.trainer.torch.critic import Critic, values_of
from agentrl.trainer.torch.forward import check_trainable, token_outputs
from agentrl.trainer.torch.learner import Learner
from agentrl.types import BoolArray, FloatArray, Sample, ScoreRole, Scores, TrainBatch
from agentrl.weights import deliver, named_weights


class Beside(NamedTuple):
    """The networks beside the policy: one that learns values, and two that stay as they are."""

    critic: Critic | None = None
    ref: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None


_ALONE = Beside()


class TorchTrainer:
    """Trains `model` in place.

    Its methods run on the caller's thread from start to end, so a task that is cancelled
    never leaves half a step behind. Dropout is off: the loss compares probabilities with
    those of an engine that has none.

    Args:
        model: a causal language model in fp32 with full attention.
        loss: the per-token loss, e.g. `PolicyLoss()` or `sft_loss`. One whose `entropy_coef` is not 0 gets
            an entropy with a gradient.
        config: optimizer, schedule and size of micro-batches.
        tokenizer: saved beside the weights.
        total_steps: optimizer steps that a decay is spread over where lr_decay_iters is left out.
        beside: the networks of the other roles.

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
        beside: Beside = _ALONE,
    ) -> None:
        model.eval()
        check_trainable(model)
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        # Only a bonus on the entropy needs its gradient, which costs memory.
        bonus = bool(getattr(loss, "entropy_coef", 0.0))
        forward = partial(token_outputs, bf16=config.bf16, entropy_gradient=bonus)
        self._policy = Learner(model, forward, loss, config, total_steps)
        self._extras = extras_used(loss)
        self._beside = beside
        self._step = 0

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token in each role, at each sample's temperature; values of trainable tokens.

        A first token has nothing before it and gets 0. Without the role `old`, the old logprobs are those
        of the engine.

        Raises:
            ValueError: nobody here has that role.
        """
        scored = {role: self._score(samples, role) for role in roles}
        engine = tuple(sample.logprobs for sample in samples)
        return Scores(
            old=scored.get("old", engine),
            ref=scored.get("ref"),
            teacher=scored.get("teacher"),
            values=scored.get("values"),
        )

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step of the critic, where there is one, and one of the policy.

        A gradient that is not finite is thrown away: weights and optimizer stay as they were,
        train/skipped_steps (in all so far) grows by one, and the schedule goes on.

        Raises:
            ValueError: no token of the batch is under a loss mask, or one was sampled greedily.
            UserError: the engine does not give the extras that the loss uses.
        """
        if not batch.num_loss_tokens:
            raise ValueError("no token of the batch is under the loss mask; leave the step out")
        check_extras(batch.samples, self._extras)
        metrics: dict[str, float] = {}
        critic = self._beside.critic
        if critic is not None:
            metrics |= critic.learn(batch)
        if critic is None or self._step >= critic.alone:
            metrics |= self._policy.learn(batch)
        self._step += 1
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

    def close(self) -> None:
        """Nothing runs beside it."""

    def _score(self, samples: Sequence[Sample], role: ScoreRole) -> tuple[FloatArray, ...]:
        critic = self._beside.critic
        networks = {
            "old": self._model,
            "ref": self._beside.ref,
            "teacher": self._beside.teacher,
            "values": None if critic is None else critic.network,
        }
        network = networks[role]
        if network is None:
            raise ValueError(f"this trainer has no network in the role `{role}`; give it one")
        if role == "values":
            return self._over(network, samples, [sample.loss_mask for sample in samples], self._values)
        return self._over(network, samples, [np.arange(len(s)) > 0 for s in samples], self._logprobs)

    def _over(
        self,
        network: PreTrainedModel,
        samples: Sequence[Sample],
        masks: Sequence[BoolArray],
        of: Callable[[PreTrainedModel, MicroBatch], Tensor],
    ) -> tuple[FloatArray, ...]:
        """What `network` says of the tokens under `masks`; 0 elsewhere."""
        scored = [np.zeros(len(sample), dtype=np.float32) for sample in samples]
        with torch.no_grad(), segment_attention(network):
            for row in micro_batches(samples, masks, self._config.max_tokens_per_gpu):
                found_N = of(network, row).float().cpu().numpy()
                counts = [len(at) for at in row.positions]
                parts = np.split(found_N, np.cumsum(counts)[:-1])
                for member, at, part in zip(row.members, row.positions, parts, strict=True):
                    scored[member][at] = part
        return tuple(scored)

    def _logprobs(self, network: PreTrainedModel, row: MicroBatch) -> Tensor:
        return token_outputs(network, row, bf16=self._config.bf16).logp_N

    def _values(self, network: PreTrainedModel, row: MicroBatch) -> Tensor:
        return values_of(network, row, bf16=self._config.bf16)
