"""Megatron's optimizer under the schedule and the names of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.optimizers import learning_rate


class Optimizer:
    """AdamW over every parameter of the stages, with the norm of the gradient over all ranks.

    total_steps: that a decay of the learning rate is spread over.
    """

    def __init__(
        self, stages: Sequence[DistributedDataParallel], config: TrainerConfig, *, total_steps: int
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        self._step = 0
        self._skipped = 0
        self._inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                clip_grad=config.clip_grad,
                bf16=config.bf16,
                use_distributed_optimizer=False,
            ),
            list(stages),
            use_gloo_process_groups=False,
        )

    def step(self) -> dict[str, float]:
        """Apply the gradients; one that is not finite is thrown away, and the schedule goes on.

        Returns:
            grad_norm (before clipping), lr, skipped_steps (in all so far).
        """
        lr = learning_rate(self._config, self._step, self._total_steps)
        for group in self._inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._inner.prepare_grads()
        grad_norm = float(self._inner.get_grad_norm())
        if math.isfinite(grad_norm):
            self._inner.step()
        else:
            self._skipped += 1
        # It leaves the buffer in `grad` that the next backward pass adds `grad` to: it would count twice.
        self._inner.zero_grad()
        self._step += 1
        return {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(self._skipped)}
