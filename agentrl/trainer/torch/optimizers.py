"""Optimizers and the schedule of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) out of `total_steps`.

    It rises linearly and reaches lr with step lr_warmup_iters - 1, so the first step counts
    too; then it falls and reaches min_lr after the last step of the decay.
    """
    if step < config.lr_warmup_iters:
        return config.lr * (step + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    end = config.lr_decay_iters or total_steps
    if step >= end:
        return config.min_lr
    passed = (step - config.lr_warmup_iters) / (end - config.lr_warmup_iters)
    left = 1.0 - passed if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return config.min_lr + (config.lr - config.min_lr) * left


class Optimizer:
    """One or two torch optimizers that step together over every trainable weight of a model."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        matrices = hidden_matrices(model) if config.optimizer == "muon" else []
        chosen = {id(matrix) for matrix in matrices}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
        self.parts: list[torch.optim.Optimizer] = [_adamw(others, config)]
        if matrices:
            self.parts.append(_muon(matrices, config))

    def step(self, lr: float) -> None:
        """Apply the gradients at rate `lr`."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """The trainable 2-D weights between the embedding and the head: what Muon is made for."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outer = {id(p) for end in ends if isinstance(end, nn.Module) for p in end.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outer]


def _adamw(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=True,
    )


def _muon(matrices: list[nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    # This scaling gives an update AdamW's size, so that both share one learning rate.
    return torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
