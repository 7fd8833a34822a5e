"""Fields of Megatron's own configs that a user may set: which there are, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum

from agentrl.errors import ConfigError
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import JSON


class Target(StrEnum):
    """A class of Megatron's that a field is of."""

    MODEL = "TransformerConfig"
    REPLICAS = "DistributedDataParallelConfig"
    OPTIMIZER = "OptimizerConfig"


OPEN: Mapping[Target, Mapping[str, type]] = {
    Target.MODEL: {
        "fp32_residual_connection": bool,
        "moe_router_dtype": str,
        "clone_scatter_output_in_embedding": bool,
        "recompute_method": str,
        "recompute_num_layers": int,
        "recompute_modules": list,
        "distribute_saved_activations": bool,
        "deallocate_pipeline_outputs": bool,
        "batch_p2p_sync": bool,
        "overlap_p2p_comm_warmup_flush": bool,
        "microbatch_group_size_per_vp_stage": int,
        "deterministic_mode": bool,
        "config_logger_dir": str,
    },
    Target.REPLICAS: {
        "overlap_grad_reduce": bool,
        "overlap_param_gather": bool,
        "bucket_size": int,
        "pad_buckets_for_high_nccl_busbw": bool,
        "reduce_scatter_with_fp32_accumulation": bool,
    },
    Target.OPTIMIZER: {
        "decoupled_lr": float,
        "decoupled_weight_decay": bool,
        "apply_wd_to_qk_layernorm": bool,
    },
}
"""All that something here reads and no other setting decides. Those of the model and of the replicas change
neither logprobs nor gradients, but for `moe_router_dtype`, by what bf16 rounds."""

CHOICES: Mapping[str, JSON] = {"moe_router_dtype": "fp32"}
"""The one value of an open field, where it is not left out."""

FIXED: Mapping[str, JSON] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    # Weights are loaded, never initialized at random.
    "use_cpu_initialization": True,
    "perform_initialization": False,
    # The loss is a sum of weights x terms: Megatron must not average it.
    "calculate_per_token_loss": True,
    "moe_token_dispatcher_type": "alltoall",
}
"""Fields of TransformerConfig that have one value here, whatever the model."""


def chosen(layout: MegatronConfig, target: Target) -> dict[str, JSON]:
    """A user's fields of one of the classes."""
    return {name: value for name, value in layout.megatron_config.items() if name in OPEN[target]}


def check_arguments(fields: Mapping[str, JSON], sizes: Mapping[str, JSON]) -> None:
    """Check that a user's fields are open, of their type, or say what is so anyway. sizes: the checkpoint's.

    Raises:
        ConfigError: a field contradicts the checkpoint, is a setting of agentrl's own, or has no effect here.
    """
    for name, value in fields.items():
        for section, kind in (("layout", MegatronConfig), ("trainer", TrainerConfig)):
            if name in kind.model_fields:
                raise ConfigError(f"megatron_config holds {name}; set it under [{section}] itself.")
        if name in sizes:
            _check_same(name, value, sizes[name], "the checkpoint has")
        elif name in FIXED:
            _check_same(name, value, FIXED[name], "here it is always")
        else:
            _check_open(name, value)


def _check_same(name: str, value: JSON, own: JSON, who: str) -> None:
    if value != own:
        raise ConfigError(f"megatron_config says {name} = {value!r}, {who} {own!r}; leave it out.")


def _check_open(name: str, value: JSON) -> None:
    known = {name: kind for of_class in OPEN.values() for name, kind in of_class.items()}
    if name not in known:
        near = get_close_matches(name, known, 1)
        raise ConfigError(
            f"megatron_config holds {name}, which nothing here reads, or which would change what a loss "
            f"means; leave it out{f', or write {near[0]}' if near else ''}. These are: {', '.join(known)}."
        )
    # In Python, True is an int.
    is_whole = known[name] is float and type(value) is int
    if type(value) is not known[name] and not is_whole:
        raise ConfigError(
            f"megatron_config says {name} = {value!r}; it must be of type {known[name].__name__}."
        )
    if value != CHOICES.get(name, value):
        raise ConfigError(
            f"megatron_config says {name} = {value!r}; write {CHOICES[name]!r}, or leave it out."
        )
