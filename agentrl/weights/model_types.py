"""transformers' classes that open a model by the `model_type` of its config, with the types that it lacks.

Such a model's folder brings Python files for its type, which are never run. Its layers are those of a type
that transformers has.
"""

from __future__ import annotations

import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

__all__ = ("AutoConfig", "AutoModelForCausalLM")


# Named as the config of its model class, as transformers asks for.
class DeepseekV3Config(transformers.DeepseekV3Config):
    """Of Kimi K2, whose layers are DeepSeek-V3's (its `architectures` says so, too)."""

    model_type = "kimi_k2"


class MiMoConfig(Qwen2Config):
    """Of MiMo: a Qwen2, and layers behind it that predict tokens further ahead (count)."""

    model_type = "mimo"

    num_nextn_predict_layers: int = 0


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo without those layers."""

    config_class = MiMoConfig


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
AutoConfig.register(DeepseekV3Config.model_type, DeepseekV3Config)
AutoModelForCausalLM.register(DeepseekV3Config, DeepseekV3ForCausalLM, exist_ok=True)
# Experts are one by one in its files.
register_checkpoint_conversion_mapping(
    DeepseekV3Config.model_type,
    get_checkpoint_conversion_mapping(transformers.DeepseekV3Config.model_type),
)
