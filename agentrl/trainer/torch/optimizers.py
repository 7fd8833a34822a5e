"""AdamW and Muon over the weights of one model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.trainer.config import TrainerConfig


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
    """The trainable 2-D weights between the embedding and the head: the weights that Muon optimizes."""
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
    # This scaling gives an update the size of AdamW's, so that both share one learning rate.
    return torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
