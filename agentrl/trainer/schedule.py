"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from agentrl.trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) out of `total_steps`.

    It rises linearly and reaches lr with step lr_warmup_iters - 1, so the first step has a rate above 0;
    then it falls and reaches min_lr after the last step of the decay.
    """
    if step < config.lr_warmup_iters:
        return config.lr * (step + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    end = config.lr_decay_iters or total_steps
    if step >= end:
        return config.min_lr
    passed = (step - config.lr_warmup_iters) / (end - config.lr_warmup_iters)
    factor = 1.0 - passed if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return config.min_lr + (config.lr - config.min_lr) * factor
