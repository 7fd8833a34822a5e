"""From a checkpoint's config to Megatron's: sizes are read; overrides must not contradict them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from transformers import PretrainedConfig

from agentrl.errors import ConfigError, ModelLoadError
from agentrl.trainer.config import TrainerConfig, learning_names
from agentrl.trainer.megatron.arguments import check_arguments
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.families import (
    FAMILIES,
    Family,
    LayerKind,
    Placed,
    family_of,
    rules_of,
)
from agentrl.trainer.megatron.model.rules import DeltaSizes, Dims
from agentrl.trainer.megatron.model.windows import LayerAttention, attention_of
from agentrl.types import JSON, ExpertLayers
from agentrl.weights.hf.routing import experts_by_layer as experts_of
from agentrl.weights.hf.source import EXPERTS
from agentrl.weights.hf.tensors import tensor_shapes


class Latent(NamedTuple):
    """Sizes of multi-latent attention: of its small states (0 = queries have none), and of a head.

    positioned: the channels of queries and keys that are rotated; scale: of the scores.
    """

    queries: int
    keys_and_values: int
    positioned: int
    other: int
    value: int
    scale: float


class Gating(NamedTuple):
    """How one of the two inner layers gates the other: activation(gate) x up.

    activation: `silu` or `gelu_pytorch_tanh`. limit: of the gate from above, and of up from both sides; with
    one (gpt-oss) it is gate x sigmoid(alpha x gate) x (up + 1).
    """

    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.0


class Shape(NamedTuple):
    """The architecture of a model. sizes: fields of Megatron's TransformerConfig, from the checkpoint.

    experts_by_layer: their number in each layer; 0 = it has a feed-forward block. attention_by_layer: what
    each layer attends to. tied: the embedding is the head, too. critic: the head has one output in place of
    the vocabulary. pad: the token whose embedding does not learn, see `pad_of`. latent: its attention. delta:
    of layers of linear attention.
    gate: of feed-forward blocks and experts. embedding_scale: what embeddings are multiplied with. ahead:
    layers that predict tokens further ahead, see `num_ahead`.
    """

    family: Family
    sizes: Mapping[str, int | float | bool | str]
    experts_by_layer: Sequence[int]
    attention_by_layer: Sequence[LayerAttention]
    vocab: int
    max_length: int
    tied: bool
    critic: bool = False
    pad: int | None = None
    latent: Latent | None = None
    delta: DeltaSizes | None = None
    ahead: int = 0
    gate: Gating = Gating()
    embedding_scale: float | None = None

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 = the model is dense."""
        return max(self.experts_by_layer)

    @property
    def hidden(self) -> int:
        """Width of the states between layers (channels)."""
        return int(self.sizes["hidden_size"])

    @property
    def heads(self) -> int:
        """Heads of queries (count)."""
        return int(self.sizes["num_attention_heads"])

    @property
    def groups(self) -> int:
        """Heads of keys and values (count)."""
        return int(self.sizes["num_query_groups"])

    @property
    def channels(self) -> int:
        """Of a head (count)."""
        return int(self.sizes["kv_channels"])

    @property
    def ffn(self) -> int:
        """Channels of a feed-forward block."""
        return int(self.sizes["ffn_hidden_size"])

    @property
    def expert_layers(self) -> ExpertLayers:
        """Its layers of experts."""
        numbers = tuple(layer for layer, number in enumerate(self.experts_by_layer) if number)
        k = int(self.sizes.get("moe_router_topk", 0))
        return ExpertLayers(numbers, len(self.experts_by_layer), k)

    @property
    def of_a_critic(self) -> Shape:
        """The shape of a critic with the same trunk."""
        return self._replace(tied=False, critic=True, ahead=0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture; those that predict further ahead are what the last one is."""
        return self.experts_by_layer[min(layer, len(self.experts_by_layer) - 1)] > 0

    def attention_at(self, layer: int) -> LayerAttention:
        """What a layer attends to; those that predict further ahead, what the last one does."""
        return self.attention_by_layer[min(layer, len(self.attention_by_layer) - 1)]

    def rules(self) -> Iterator[Placed]:
        """All parameters, in the order of the layers."""
        layers = [
            LayerKind(number, attention.is_linear)
            for number, attention in zip(self.experts_by_layer, self.attention_by_layer, strict=True)
        ]
        return rules_of(self.family, layers, tied=self.tied, critic=self.critic, ahead=self.ahead)

    def by_tensor(self) -> dict[str, list[Placed]]:
        """The parameters that have a part of each tensor of a checkpoint, by its name, in the same order."""
        by_tensor: dict[str, list[Placed]] = {}
        for placed in self.rules():
            for name in placed.hf:
                by_tensor.setdefault(name, []).append(placed)
        return by_tensor

    def dims(self, tensor_ranks: int) -> Dims:
        """The sizes for the rules. tensor_ranks: those that shard the vocabulary."""
        return Dims(
            query_groups=self.groups,
            kv_channels=self.channels,
            padded_vocab=-(-self.vocab // tensor_ranks) * tensor_ranks,
            delta=self.delta,
        )


def shape_of(config: PretrainedConfig) -> Shape:
    """Read a checkpoint's config.

    Raises:
        ModelLoadError: there is no table for its family, or it has a feature that Megatron lacks.
    """
    fields = config.to_dict()
    family = family_of(config.model_type, fields)
    hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
    vocab = int(fields["vocab_size"])
    _check_supported(config.model_type, family, fields)
    experts_by_layer = experts_of(config) if family.moe else (0,) * int(fields["num_hidden_layers"])
    return Shape(
        family=family,
        sizes={
            "num_layers": len(experts_by_layer),
            "hidden_size": hidden,
            "ffn_hidden_size": _first(config, "intermediate_size", "moe_intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": int(fields.get("num_key_value_heads") or heads),
            "kv_channels": int(fields.get("head_dim") or hidden // heads),
            "layernorm_epsilon": float(fields["rms_norm_eps"]),
            "rotary_interleaved": bool(fields.get("rope_interleave", family.rotates_pairs)),
            **_softmax_scale(config),
            **(_moe_sizes(config) if max(experts_by_layer) else {}),
            **family.settings,
        },
        latent=_latent_of(config) if family.is_latent else None,
        experts_by_layer=experts_by_layer,
        delta=_delta_of(config) if family.linear else None,
        attention_by_layer=attention_of(
            config, has_windows=family.has_windows, has_linear=bool(family.linear)
        ),
        vocab=vocab,
        max_length=int(fields["max_position_embeddings"]),
        tied=bool(fields["tie_word_embeddings"]),
        pad=pad_of(fields.get("pad_token_id"), vocab),
        gate=_gate_of(family, config),
        embedding_scale=hidden**0.5 if family.scales_embedding else None,
    )


def num_ahead(config: PretrainedConfig) -> int:
    """Layers behind the last one that predict tokens further ahead (multi-token prediction), by a config.

    Its files may lack them all the same. 0 = Megatron trains none of its family.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or family.ahead is None:
        return 0
    return int(getattr(config, "num_nextn_predict_layers", None) or 0)


def tensor_shapes_of(shape: Shape, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """`tensor_shapes` of a config, with those of the layers that predict further ahead."""
    shapes = tensor_shapes(config)
    last, hidden = len(shape.experts_by_layer) - 1, shape.hidden
    for placed in shape.rules():
        if placed.depth is None:
            continue
        # Norms and a matrix beside what the last layer has, too.
        own = (hidden, 2 * hidden) if placed.rule.megatron == "eh_proj.weight" else (hidden,)
        of_last = Placed(placed.rule, last, placed.expert).hf
        for name, alike in zip(placed.hf, of_last, strict=True):
            shapes[name] = shapes.get(alike, own)
    return shapes


def _softmax_scale(config: PretrainedConfig) -> dict[str, float]:
    """Of the scores, where it is not that of a head's channels."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    return {} if scalar is None else {"softmax_scale": float(scalar) ** -0.5}


def _gate_of(family: Family, config: PretrainedConfig) -> Gating:
    limit = getattr(config, "swiglu_limit", None)
    if limit is None:
        return Gating(family.activation)
    return Gating(family.activation, float(limit), float(config.swiglu_alpha))


def _moe_sizes(config: PretrainedConfig) -> dict[str, int | float | bool]:
    """The fields of Megatron's config for layers of experts."""
    fields = config.to_dict()
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    sizes: dict[str, int | float | bool] = {
        "num_moe_experts": _first(config, *EXPERTS),
        "moe_router_topk": int(fields["num_experts_per_tok"]),
        "moe_ffn_hidden_size": width,
        # Megatron's name for weights of the chosen experts that do not sum to 1.
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", True),
        "moe_router_topk_scaling_factor": float(fields.get("routed_scaling_factor") or 1.0),
    }
    shared = fields.get("shared_expert_intermediate_size")
    shared = shared or width * int(fields.get("n_shared_experts") or 0)
    if shared:
        sizes["moe_shared_expert_intermediate_size"] = int(shared)
    if int(fields.get("n_group") or 1) > 1 and fields.get("topk_method") != "greedy":
        sizes["moe_router_num_groups"] = int(fields["n_group"])
        sizes["moe_router_group_topk"] = int(fields["topk_group"])
    return sizes


def _first(config: PretrainedConfig, *names: str) -> int:
    """The first of some fields that there is."""
    fields = config.to_dict()
    return next(int(fields[name]) for name in names if fields.get(name) is not None)


def pad_of(pad: JSON, vocab: int) -> int | None:
    """The token that has no gradient as an input, as in torch (`padding_idx` of its embedding).

    A new model's row of it is 0, and where a policy samples it, the norm over that row has a gradient that
    is larger than all others together. None = there is no such token.
    """
    return pad % vocab if isinstance(pad, int) else None


def check_layout(shape: Shape, layout: MegatronConfig) -> None:
    """Check that the ranks divide every sharded size, and that no override contradicts the checkpoint.

    Raises:
        ConfigError: naming the size and the setting.
    """
    check_arguments(layout.megatron_config, shape.sizes)
    recompute = [name for name in layout.megatron_config if name.startswith("recompute_")]
    if recompute and layout.recompute_granularity is None:
        raise ConfigError(
            f"megatron_config sets {recompute[0]}, but nothing is recomputed; set recompute_granularity, too."
        )
    _check_experts(shape, layout)
    tensor = layout.tensor_model_parallel_size
    layout.stages(int(shape.sizes["num_layers"]))
    for size, ranks, what, setting in (
        ("num_attention_heads", tensor, "attention heads", "tensor_model_parallel_size"),
        ("num_query_groups", tensor, "heads of keys and values", "tensor_model_parallel_size"),
        ("ffn_hidden_size", tensor, "channels of the feed-forward blocks", "tensor_model_parallel_size"),
    ):
        number = int(shape.sizes[size])
        if number % ranks:
            raise ConfigError(f"{setting} = {ranks} does not divide the model's {number} {what}; lower it.")
    sharing = tensor * layout.context_parallel_size
    if shape.delta is not None and shape.delta.key_heads % sharing:
        raise ConfigError(
            f"tensor_model_parallel_size x context_parallel_size = {sharing} ranks share the heads of linear "
            f"attention, and do not divide its {shape.delta.key_heads} heads of keys; lower one of them."
        )


def check_replay(config: TrainerConfig, layout: MegatronConfig) -> None:
    """Check that what is recomputed takes the experts that it took before.

    Raises:
        ConfigError: the experts of a layer are recomputed by themselves, after other rows.
    """
    modules = layout.megatron_config.get("recompute_modules")
    if config.router_replay and isinstance(modules, list) and "mlp" in modules:
        raise ConfigError(
            "recompute_modules = mlp computes experts again without knowing of which row, and router_replay "
            "needs that; leave mlp out, or set recompute_granularity = full."
        )


def learning_of(shape: Shape, config: TrainerConfig) -> frozenset[Placed]:
    """The parameters of a policy that learn, by the names of the checkpoint's tensors that make them.

    A router's bias never does.

    Raises:
        ConfigError: see `learning_names`; or some of the tensors that make one parameter learn, and some not;
            or Muon is to train experts.
    """
    if config.optimizer == "muon" and shape.num_experts:
        raise ConfigError("Megatron trains experts with AdamW alone; set optimizer = adamw.")
    every = [placed for placed in shape.rules() if placed.rule.learns]
    names = [name for placed in every for name in placed.hf]
    # A mixture has tens of thousands of them.
    learning = frozenset(names if config.all_learn else learning_names(config, names, "the model"))
    chosen = [placed for placed in every if not learning.isdisjoint(placed.hf)]
    for placed in chosen:
        if not learning.issuperset(placed.hf):
            raise ConfigError(
                f"Megatron has {' and '.join(placed.hf)} as one parameter, of which "
                "only_train_params_name_list and freeze_params_name_list choose a part; name all, or none."
            )
    return frozenset(chosen)


def _check_experts(shape: Shape, layout: MegatronConfig) -> None:
    ranks, number = layout.expert_model_parallel_size, shape.num_experts
    if number == 0:
        if ranks > 1 or layout.expert_tensor_parallel_size not in (None, 1):
            raise ConfigError(
                "expert_model_parallel_size and expert_tensor_parallel_size are for a model with experts, "
                "and this one has none; leave them out."
            )
        if "moe_router_dtype" in layout.megatron_config:
            raise ConfigError(
                "megatron_config sets moe_router_dtype, and this model has no router; leave it out."
            )
        return
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise ConfigError(
            "tensor ranks would each send all tokens to the experts; set sequence_parallel = true."
        )
    width, sharing = int(shape.sizes["moe_ffn_hidden_size"]), layout.expert_tensor_ranks
    if number % ranks:
        raise ConfigError(
            f"expert_model_parallel_size = {ranks} does not divide the model's {number} experts; lower it."
        )
    if width % sharing:
        raise ConfigError(
            f"expert_tensor_parallel_size = {sharing} does not divide the model's {width} channels of an "
            "expert; set it to 1."
        )


def _latent_of(config: PretrainedConfig) -> Latent:
    fields = config.to_dict()
    positioned, other = int(fields["qk_rope_head_dim"]), int(fields["qk_nope_head_dim"])
    rope, scale = fields["rope_parameters"], (positioned + other) ** -0.5
    # As in transformers, yarn also sharpens the scores.
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(max(rope["factor"], 1.0)) + 1.0) ** 2
    return Latent(
        int(fields.get("q_lora_rank") or 0),
        int(fields["kv_lora_rank"]),
        positioned,
        other,
        int(fields["v_head_dim"]),
        scale,
    )


def _delta_of(config: PretrainedConfig) -> DeltaSizes:
    return DeltaSizes(
        int(config.linear_num_key_heads),
        int(config.linear_num_value_heads),
        int(config.linear_key_head_dim),
        int(config.linear_value_head_dim),
        int(config.linear_conv_kernel_dim),
    )


def _check_supported(model_type: str, family: Family, fields: Mapping[str, JSON]) -> None:
    activation = fields.get("hidden_activation", fields.get("hidden_act"))
    caps = [
        name for name in ("attn_logit_softcapping", "final_logit_softcapping") if fields.get(name) is not None
    ]
    biases = "add_qkv_bias" not in family.settings and bool(
        fields.get("attention_bias") or fields.get("mlp_bias")
    )
    for is_present, feature in (
        (biases, "biases in its layers"),
        (activation != family.activation, f"the activation {activation}"),
        (bool(caps), f"caps on its scores or logits ({' and '.join(caps)})"),
        (bool(fields.get("use_bidirectional_attention")), "attention to later tokens"),
    ):
        if is_present:
            raise ModelLoadError(
                f"this {model_type} has {feature}, which its table in families.py does not; train it with "
                "trainer = torch."
            )
