"""The parameters of a network that learn: adapters alone, those that patterns choose, or all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.trainer.config import TrainerConfig


def freeze(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Have a model learn only what the settings choose, in place: all else of it gets no gradient.

    Raises:
        ConfigError: a pattern is in the name of no parameter, or nothing is left to learn; or see `adapt`.
    """
    if config.lora_rank:
        from agentrl.trainer.torch.adapters import adapt

        adapt(model, config)
        return
    only, frozen = config.only_train_params_name_list, config.freeze_params_name_list
    names = [name for name, _ in model.named_parameters()]
    if unknown := [pattern for pattern in (*only, *frozen) if not _is_any((pattern,), names)]:
        raise ConfigError(
            f"`{unknown[0]}` is in the name of no parameter of {type(model).__name__}; mend it: "
            f"they are named as {names[0]} and {names[-1]} are."
        )
    learning = {name for name in names if (not only or _is_any(only, [name])) and not _is_any(frozen, [name])}
    if not learning:
        raise ConfigError(
            f"freeze_params_name_list leaves nothing of {type(model).__name__} to learn; drop some of it."
        )
    if only or frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learning)


def _is_any(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)
