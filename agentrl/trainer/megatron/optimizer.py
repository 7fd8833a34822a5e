"""Megatron's optimizer with agentrl's schedule and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.state import Part, begin_moments, parts_of
from agentrl.trainer.plan import Done
from agentrl.trainer.schedule import learning_rate


class MegatronOptimizer:
    """AdamW over every parameter of the stages, with the norm of the gradient over all ranks.

    total_steps: the optimizer steps that a decay of the learning rate takes.
    """

    def __init__(
        self,
        network: Network,
        stages: Sequence[DistributedDataParallel],
        config: TrainerConfig,
        *,
        total_steps: int,
    ) -> None:
        self._network = network
        self._config = config
        self._total_steps = total_steps
        self._done = Done(0, 0)
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
                params_dtype=network.config.params_dtype,
                use_distributed_optimizer=network.layout.shares_the_optimizer,
            ),
            list(stages),
            use_gloo_process_groups=False,
        )
        for group in self._inner.param_groups:
            # Megatron has no setting for it. The fused kernel takes a third of the time of the separate ones.
            group["fused"] = True

    def step(self, leaves_out: Callable[[float], bool]) -> tuple[dict[str, float], bool]:
        """Apply the gradients; a gradient that is not finite is discarded, and the schedule advances.

        leaves_out: whether a step of this norm changes nothing.

        Returns:
            grad_norm (before clipping), lr, skipped_steps (in all so far); and whether it was left out.
        """
        steps, skipped = self._done
        lr = learning_rate(self._config, steps, self._total_steps)
        for group in self._inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._inner.prepare_grads()
        grad_norm = float(self._inner.get_grad_norm())
        is_left_out = leaves_out(grad_norm)
        if math.isfinite(grad_norm) and not is_left_out:
            clip_grad_by_total_norm_fp32(self._inner.get_parameters(), self._config.clip_grad, grad_norm)
            self._inner.step_with_ready_grads()
        elif not is_left_out:
            skipped += 1
        # Megatron leaves its buffer in `grad`, and the next backward pass adds `grad` to it: counted twice.
        self._inner.zero_grad()
        self._done = Done(steps + (not is_left_out), skipped)
        return {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(skipped)}, is_left_out

    @property
    def done(self) -> Done:
        """Its steps so far."""
        return self._done

    def parts(self) -> Iterator[Part]:
        """This rank's part of each parameter."""
        return parts_of(self._inner, self._network.pieces())

    def resume(self, done: Done) -> Iterator[Part]:
        """Set the steps so far, and allocate the moments; returns this rank's parts, to be filled."""
        self._done = done
        begin_moments(self._inner, self._network.pieces(), steps=done.stepped)
        return self.parts()
