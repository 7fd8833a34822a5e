"""The families of models that Megatron trains: for each a table of parameters, and settings.

A new family is a table: Megatron's names on the left, the checkpoint's on the right, both below the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.model.rules import (
    GateUp,
    KeyHeads,
    Qkv,
    Rule,
    Same,
    Stacked,
    Swapped,
    Vocabulary,
)
from agentrl.types import JSON

_EMBEDDING = Vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")
_FINAL_NORM = Same("decoder.final_layernorm.weight", "model.norm.weight")
_HEAD = Vocabulary("output_layer.weight", "lm_head.weight")
VALUE_HEAD = "score.weight"
_OF_LAYER = "model.layers.{layer}."
_VALUE_HEAD = Same("output_layer.weight", VALUE_HEAD)

_INPUT_NORM = Same("input_layernorm.weight", "input_layernorm.weight")
_QKV = Qkv("self_attention.linear_qkv.weight", "self_attn.{}_proj.weight")
_QKV_BIAS = Qkv("self_attention.linear_qkv.bias", "self_attn.{}_proj.bias")
_ATTENTION_OUT = Same("self_attention.linear_proj.weight", "self_attn.o_proj.weight", along=1)
_ATTENTION_OUT_BIAS = Same("self_attention.linear_proj.bias", "self_attn.o_proj.bias")
_SINKS = Same("self_attention.sinks", "self_attn.sinks", along=0)
_MLP_NORM = Same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")
_MLP_IN = GateUp("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"))
_MLP_OUT = Same("mlp.linear_fc2.weight", "mlp.down_proj.weight", along=1)


@dataclass(frozen=True, slots=True)
class AheadRules:
    """Of the layers that predict further ahead: each is one as the model's last, with some parameters more.

    beside: these; embedding and head are the model's. begin: what the checkpoint's names of a layer begin
    with. {layer} is its number, counted on behind the last one, and {depth} its number among them.
    """

    beside: tuple[Rule, ...]
    begin: str = _OF_LAYER

    def first(self, layer: int) -> str:
        """A tensor that the first of them has. layer: its number."""
        return self.begin.format(layer=layer, depth=0) + self.beside[0].hf[0]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model: the parameters of its layers, and what they compute.

    attention: of every layer, with both norms. mlp: of a feed-forward block. moe, expert: of a mixture of
    experts in its place, and of each expert in it; the checkpoint's names have {} for the expert's number.
    settings: fields of Megatron's config that all its models share.
    sandwich: it normalises also the outputs of attention and feed-forward block.
    rotates_pairs: rotary positions rotate neighbouring channels, not the two halves. is_latent: keys
    and values of all heads come from one small state of a token (multi-latent attention). norms_all_heads:
    queries are normalised over all heads together, and keys; not each head by itself. has_windows: its
    config may give layers a window. has_sinks: see `Scoring`. activation: of the gates. scales_embedding: by
    the root of its width. has_biases: after attention, in routers and in experts. stacks_experts: each tensor
    of a checkpoint has those of all experts, see `Stacked`.
    ahead: of layers that predict tokens further ahead, where its checkpoints may have some.
    linear: of a layer of linear attention (a gated delta net), in place of `attention`. gates_attention: what
    a head attended to is multiplied with the sigmoid of a gate, whose rows lie behind those of its query.
    """

    attention: tuple[Rule, ...]
    mlp: tuple[Rule, ...] = (_MLP_IN, _MLP_OUT)
    moe: tuple[Rule, ...] = ()
    expert: tuple[Rule, ...] = ()
    settings: Mapping[str, bool | str] = field(default_factory=dict)
    sandwich: bool = False
    rotates_pairs: bool = False
    is_latent: bool = False
    norms_all_heads: bool = False
    ahead: AheadRules | None = None
    has_windows: bool = False
    has_sinks: bool = False
    activation: str = "silu"
    scales_embedding: bool = False
    has_biases: bool = False
    stacks_experts: bool = False
    linear: tuple[Rule, ...] = ()
    gates_attention: bool = False


_QK_NORMS = (
    Same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_ROUTER = Same("mlp.router.weight", "mlp.gate.weight")
_EXPERT = (
    GateUp("linear_fc1.weight", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    Same("linear_fc2.weight", "mlp.experts.{}.down_proj.weight", along=1),
)


def _shared(name: str) -> tuple[Rule, ...]:
    """Experts that all tokens go through, by their name in the checkpoint."""
    return (
        GateUp(
            "mlp.shared_experts.linear_fc1.weight", (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
        ),
        Same("mlp.shared_experts.linear_fc2.weight", f"{name}.down_proj.weight", along=1),
    )


_GATED_SHARED = (
    _ROUTER,
    *_shared("mlp.shared_expert"),
    Same("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
_SPARSE_ROUTER = Same("mlp.router.weight", "block_sparse_moe.gate.weight")
_SPARSE_EXPERT = (
    GateUp(
        "linear_fc1.weight",
        ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    ),
    Same("linear_fc2.weight", "block_sparse_moe.experts.{}.w2.weight", along=1),
)
_EXPERT_BIAS = Same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", learns=False)
_SIGMOID = {"moe_router_score_function": "sigmoid"}
_LATENT_QUERIES = (
    Same("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    Same("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    Same("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", along=0),
)
_LATENT = (
    _INPUT_NORM,
    *_LATENT_QUERIES,
    Same("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Same("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    Same("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", along=0),
    _ATTENTION_OUT,
    _MLP_NORM,
)
_QUERIES = Same("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", along=0)


def _delta_net(in_proj: KeyHeads) -> tuple[Rule, ...]:
    """A layer whose attention is a gated delta net."""
    return (
        _INPUT_NORM,
        in_proj,
        KeyHeads("self_attention.conv1d.weight", (("linear_attn.conv1d.weight", "qkv"),)),
        Same("self_attention.A_log", "linear_attn.A_log", along=0),
        Same("self_attention.dt_bias", "linear_attn.dt_bias", along=0),
        Same("self_attention.out_norm.weight", "linear_attn.norm.weight"),
        Same("self_attention.out_proj.weight", "linear_attn.out_proj.weight", along=1),
        _MLP_NORM,
    )


_SEPARATE_DELTA_NET = _delta_net(
    KeyHeads(
        "self_attention.in_proj.weight",
        (
            ("linear_attn.in_proj_qkv.weight", "qkv"),
            *((f"linear_attn.in_proj_{part}.weight", part) for part in "zba"),
        ),
    )
)
_OF_LINEAR = {"qk_layernorm": True, "layernorm_zero_centered_gamma": True}
_QWEN3 = (_INPUT_NORM, _QKV, *_QK_NORMS, _ATTENTION_OUT, _MLP_NORM)
_QWEN3_NEXT = Family(
    _QWEN3,
    moe=_GATED_SHARED,
    expert=_EXPERT,
    settings={**_OF_LINEAR, "moe_shared_expert_gate": True},
    linear=_delta_net(
        KeyHeads(
            "self_attention.in_proj.weight",
            (("linear_attn.in_proj_qkvz.weight", "qkvz"), ("linear_attn.in_proj_ba.weight", "ba")),
            by_head=True,
        )
    ),
    gates_attention=True,
)
_AHEAD = AheadRules(
    (
        Same("enorm.weight", "enorm.weight"),
        Same("hnorm.weight", "hnorm.weight"),
        Same("eh_proj.weight", "eh_proj.weight"),
        Same("final_layernorm.weight", "shared_head.norm.weight"),
    )
)
_AHEAD_OF_MIMO = AheadRules(
    (
        Same("enorm.weight", "token_layernorm.weight"),
        Same("hnorm.weight", "hidden_layernorm.weight"),
        # There it takes the state first, and then the embedding.
        Swapped("eh_proj.weight", "input_proj.weight"),
        Same("final_layernorm.weight", "final_layernorm.weight"),
    ),
    "model.mtp_layers.{depth}.",
)
_BESIDE = frozenset(rule.megatron for rule in _AHEAD.beside)

_QWEN2 = Family(
    (_INPUT_NORM, _QKV, _QKV_BIAS, _ATTENTION_OUT, _MLP_NORM),
    settings={"add_qkv_bias": True},
    has_windows=True,
)
_DEEPSEEK_V3 = Family(
    _LATENT,
    moe=(_ROUTER, _EXPERT_BIAS, *_shared("mlp.shared_experts")),
    expert=_EXPERT,
    settings=_SIGMOID,
    is_latent=True,
    ahead=_AHEAD,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family((_INPUT_NORM, _QKV, _ATTENTION_OUT, _MLP_NORM)),
    "qwen2": _QWEN2,
    "qwen3": Family(
        _QWEN3,
        settings={"qk_layernorm": True},
        has_windows=True,
    ),
    "qwen3_moe": Family(
        _QWEN3,
        moe=(_ROUTER,),
        expert=_EXPERT,
        settings={"qk_layernorm": True},
        has_windows=True,
    ),
    "qwen2_moe": Family(
        (_INPUT_NORM, _QKV, _QKV_BIAS, _ATTENTION_OUT, _MLP_NORM),
        moe=_GATED_SHARED,
        expert=_EXPERT,
        settings={"add_qkv_bias": True, "moe_shared_expert_gate": True},
        has_windows=True,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": replace(_QWEN3_NEXT, linear=_SEPARATE_DELTA_NET),
    "qwen3_5_text": Family(_QWEN3, settings=_OF_LINEAR, linear=_SEPARATE_DELTA_NET, gates_attention=True),
    "mixtral": Family(
        (_INPUT_NORM, _QKV, _ATTENTION_OUT, _MLP_NORM),
        moe=(_SPARSE_ROUTER,),
        expert=_SPARSE_EXPERT,
        has_windows=True,
    ),
    "glm4_moe": Family(
        (_INPUT_NORM, _QKV, _QKV_BIAS, *_QK_NORMS, _ATTENTION_OUT, _MLP_NORM),
        moe=(_ROUTER, _EXPERT_BIAS, *_shared("mlp.shared_experts")),
        expert=_EXPERT,
        settings={"add_qkv_bias": True, "qk_layernorm": True, **_SIGMOID},
        ahead=_AHEAD,
    ),
    "deepseek_v2": Family(
        _LATENT,
        moe=(_ROUTER, *_shared("mlp.shared_experts")),
        expert=_EXPERT,
        # The weights of the chosen experts do not sum to 1, whatever norm_topk_prob says.
        settings={"moe_router_dtype": "fp32", "moe_router_pre_softmax": True},
        rotates_pairs=True,
        is_latent=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "minimax_m2": Family(
        (
            _INPUT_NORM,
            _QKV,
            Same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", along=0),
            Same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", along=0),
            _ATTENTION_OUT,
            _MLP_NORM,
        ),
        moe=(
            _SPARSE_ROUTER,
            Same("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", learns=False),
        ),
        expert=_SPARSE_EXPERT,
        settings=_SIGMOID,
        norms_all_heads=True,
    ),
    "mistral": Family((_INPUT_NORM, _QKV, _ATTENTION_OUT, _MLP_NORM), has_windows=True),
    "gemma3_text": Family(
        (
            _INPUT_NORM,
            _QKV,
            *_QK_NORMS,
            Same("self_attention.linear_proj.linear.weight", "self_attn.o_proj.weight", along=1),
            Same("self_attention.linear_proj.norm.weight", "post_attention_layernorm.weight"),
            Same("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
        ),
        (
            _MLP_IN,
            Same("mlp.linear_fc2.linear.weight", "mlp.down_proj.weight", along=1),
            Same("mlp.linear_fc2.norm.weight", "post_feedforward_layernorm.weight"),
        ),
        settings={"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
        sandwich=True,
        has_windows=True,
        activation="gelu_pytorch_tanh",
        scales_embedding=True,
    ),
    "gpt_oss": Family(
        (
            _INPUT_NORM,
            _QKV,
            _QKV_BIAS,
            _SINKS,
            _ATTENTION_OUT,
            _ATTENTION_OUT_BIAS,
            _MLP_NORM,
        ),
        moe=(
            Same("mlp.router.weight", "mlp.router.weight"),
            Same("mlp.router.bias", "mlp.router.bias"),
        ),
        expert=(
            GateUp("linear_fc1.weight", ("mlp.experts.gate_up_proj",)),
            GateUp("linear_fc1.bias", ("mlp.experts.gate_up_proj_bias",)),
            Same("linear_fc2.weight", "mlp.experts.down_proj", along=1),
            Same("linear_fc2.bias", "mlp.experts.down_proj_bias"),
        ),
        settings={"add_qkv_bias": True},
        has_windows=True,
        has_sinks=True,
        has_biases=True,
        stacks_experts=True,
    ),
    "glm4": Family(
        (
            _INPUT_NORM,
            _QKV,
            _QKV_BIAS,
            Same("self_attention.linear_proj.linear.weight", "self_attn.o_proj.weight", along=1),
            Same("self_attention.linear_proj.norm.weight", "post_self_attn_layernorm.weight"),
            _MLP_NORM,
        ),
        (
            GateUp("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",)),
            Same("mlp.linear_fc2.linear.weight", "mlp.down_proj.weight", along=1),
            Same("mlp.linear_fc2.norm.weight", "post_mlp_layernorm.weight"),
        ),
        settings={"add_qkv_bias": True},
        sandwich=True,
        rotates_pairs=True,
    ),
    "mimo": replace(_QWEN2, ahead=_AHEAD_OF_MIMO),
}


def family_of(model_type: str, fields: Mapping[str, JSON]) -> Family:
    """The family of a checkpoint, by the model_type of its config; without what its other fields turn off.

    Raises:
        ModelLoadError: Megatron trains no such models yet.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelLoadError(
            f"trainer = megatron has no table for models of type `{model_type}`, only for "
            f"{', '.join(FAMILIES)}; train it with trainer = torch, or add its table to families.py."
        )
    attention, settings = family.attention, dict(family.settings)
    for setting, rules, is_on in (
        ("qk_layernorm", _QK_NORMS, fields.get("use_qk_norm", True)),
        (
            "add_qkv_bias",
            (_QKV_BIAS, _ATTENTION_OUT_BIAS),
            fields.get("qkv_bias", fields.get("attention_bias", True)),
        ),
    ):
        if setting in settings and not is_on:
            attention = tuple(rule for rule in attention if rule not in rules)
            del settings[setting]
    if family.is_latent and fields.get("q_lora_rank") is None:
        attention = tuple(
            rule if rule != _LATENT_QUERIES[0] else _QUERIES
            for rule in attention
            if rule not in _LATENT_QUERIES[1:]
        )
    return replace(family, attention=attention, settings=settings)


class LayerKind(NamedTuple):
    """What a layer is. experts: their number; 0 = it has a feed-forward block. is_linear: its attention."""

    experts: int
    is_linear: bool


def rules_of(
    family: Family, layers: Sequence[LayerKind], *, tied: bool, critic: bool = False, ahead: int = 0
) -> Iterator[Placed]:
    """All parameters of a model, in the order of the layers.

    tied: the embedding is the head, too. critic: its head has one output. ahead: layers that predict further
    ahead (count).
    """
    yield Placed(_EMBEDDING)
    for layer, (experts, is_linear) in enumerate(layers):
        attention = family.linear if is_linear else family.attention
        for rule in (*attention, *(family.moe if experts else family.mlp)):
            yield Placed(rule, layer)
        if family.stacks_experts:
            # Those of one tensor one after the other.
            pairs = product(family.expert, range(experts))
            yield from (Placed(Stacked(rule, expert), layer, expert) for rule, expert in pairs)
            continue
        for expert in range(experts):
            for rule in family.expert:
                yield Placed(rule, layer, expert)
    yield Placed(_FINAL_NORM)
    if critic:
        yield Placed(_VALUE_HEAD)
    elif not tied:
        yield Placed(_HEAD)
    if family.ahead is None:
        return
    experts, begin = layers[-1].experts, family.ahead.begin
    for depth in range(ahead):
        layer = len(layers) + depth
        for rule in (*family.ahead.beside, *family.attention, *(family.moe if experts else family.mlp)):
            yield Placed(rule, layer, None, depth, begin)
        for expert in range(experts):
            for rule in family.expert:
                yield Placed(rule, layer, expert, depth, begin)


@dataclass(frozen=True, slots=True)
class Placed:
    """A rule for one layer. layer: its number over all pipeline stages; None = outside of the layers.

    expert: its number in the layer, over all ranks; None = what all tokens go through. depth: of a layer
    that predicts further ahead, from 0; its `layer` counts on behind the last one. begin: what the names of
    its layer begin with in checkpoints, see `AheadRules`.
    """

    rule: Rule
    layer: int | None = None
    expert: int | None = None
    depth: int | None = None
    begin: str = _OF_LAYER

    @property
    def megatron(self) -> str:
        """The parameter's full name in a model of one pipeline stage."""
        if self.layer is None:
            return self.rule.megatron
        within = "" if self.expert is None else f"mlp.experts.{self.expert}."
        return f"{self.megatron_layer}{within}{self.rule.megatron}"

    @property
    def megatron_layer(self) -> str:
        """What Megatron's names of its layer begin with."""
        if self.depth is None:
            return f"decoder.layers.{self.layer}."
        return f"mtp.layers.{self.depth}.{'' if self.rule.megatron in _BESIDE else 'transformer_layer.'}"

    @property
    def hf(self) -> tuple[str, ...]:
        """The full names of the checkpoint's tensors."""
        if self.layer is None:
            return self.rule.hf
        begin = self.begin.format(layer=self.layer, depth=self.depth)
        names = (name if self.expert is None else name.format(self.expert) for name in self.rule.hf)
        return tuple(f"{begin}{name}" for name in names)
