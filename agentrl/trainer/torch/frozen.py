"""The parameters of a network that learn: adapters alone, those that patterns choose, or all."""

from __future__ import annotations

from transformers import PreTrainedModel

from agentrl.trainer.config import TrainerConfig, learning_names


def freeze(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Have a model learn only what the settings choose, in place: all else of it gets no gradient.

    Raises:
        ConfigError: see `learning_names`; or see `adapt`.
    """
    if config.lora_rank:
        from agentrl.trainer.torch.adapters import adapt

        adapt(model, config)
    elif not config.all_learn:
        names = [name for name, _ in model.named_parameters()]
        learning = learning_names(config, names, type(model).__name__)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learning)
