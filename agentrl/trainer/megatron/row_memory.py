"""What a row takes on a rank of Megatron beside weights, gradients and the optimizer: estimated from shapes.

    kept         tensors that a layer keeps for its backward pass
    dispatched   what a layer of experts holds only while it runs: rows on their way to experts and back,
                 and the gradients of its experts before they are added to the buffers

Experts are taken to get equally many tokens. Of k experts of a token, each on R ranks that shard its
matrices, a rank gets k x R rows for each token of its own. A row is as wide as the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.rules import CHUNK
from agentrl.trainer.megatron.model.shape import Latent, Shape

_FP32, _BF16, _INT64 = 4, 2, 8
_MOST_LOGITS = 2**24


class RowBytes(NamedTuple):
    """A row on a rank, by part (bytes), see above. logits: of a chunk, their softmax and gradient."""

    kept: int
    dispatched: int
    logits: int


class _Numbers(NamedTuple):
    """Bytes: number: of one in the model's dtype; norm: that a norm keeps of a channel.

    A norm keeps its input in fp32, the normalised values and its output.
    """

    number: int
    norm: int


def row_bytes(shape: Shape, layout: MegatronConfig, tokens: int, rank: int, *, bf16: bool) -> RowBytes:
    """The rows in flight on a pipeline rank, from 0: one for each rank from it to the last.

    tokens: of the longest row, unsharded.
    """
    numbers, (outside, own) = _numbers(bf16), _tokens(layout, tokens)
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    hidden = shape.hidden
    layers = [_layer(shape, layout, numbers, number) for number in stage_layers(shape, layout, rank)]
    every = [outside * layer.outside + own * layer.inside for layer in layers]
    kept = (pipeline - rank) * sum(every)
    if layout.recompute_granularity == "full":
        # Of each layer its input alone, and one layer at a time.
        inputs = len(layers) * numbers.number * hidden * outside
        kept = (pipeline - rank) * inputs + max(every)
    dispatched = max(outside * layer.dispatched + layer.gradients for layer in layers)
    vocab = -(-shape.vocab // tensor)
    logits = 3 * _FP32 * min(own * vocab, _MOST_LOGITS) if rank == pipeline - 1 else 0
    return RowBytes(int(kept), int(dispatched), logits)


def layer_bytes(shape: Shape, layout: MegatronConfig, tokens: int, number: int, *, bf16: bool) -> float:
    """What one layer keeps of a row (bytes). number: of the layer."""
    outside, own = _tokens(layout, tokens)
    layer = _layer(shape, layout, _numbers(bf16), number)
    return outside * layer.outside + own * layer.inside


def _numbers(bf16: bool) -> _Numbers:
    return _Numbers(_BF16, _FP32 + 2 * _BF16) if bf16 else _Numbers(_FP32, 3 * _FP32)


def _tokens(layout: MegatronConfig, tokens: int) -> tuple[float, int]:
    """Tokens of a rank between the matrices, and of the tensor ranks together."""
    own = -(-tokens // layout.context_parallel_size)
    return own / layout.tensor_model_parallel_size if layout.sequence_parallel else own, own


def stage_layers(shape: Shape, layout: MegatronConfig, rank: int) -> Iterator[int]:
    """The numbers of the layers of a pipeline rank."""
    last = len(shape.experts_by_layer)
    for layers in layout.stages_of(rank, last):
        yield from layers
    if rank == layout.pipeline_model_parallel_size - 1:
        # Those that predict further ahead.
        yield from range(last, last + shape.ahead)


class _Layer(NamedTuple):
    """What a layer takes (bytes). outside: of a token between the matrices; inside: of one between the
    matrices' ranks, already divided by them. dispatched: of a token outside; gradients: of its experts."""

    outside: float
    inside: float
    dispatched: float = 0
    gradients: float = 0


def _layer(shape: Shape, layout: MegatronConfig, numbers: _Numbers, number: int) -> _Layer:
    """One layer with its norms. number: of the layer."""
    size, tensor = shape.sizes, layout.tensor_model_parallel_size
    hidden, norms = shape.hidden, 4.0 if shape.family.sandwich else 2.0
    is_linear = shape.attention_at(number).is_linear
    attention = _linear_attention if is_linear else _attention
    outside, inside = norms * numbers.norm * hidden, float(attention(shape, numbers))
    if shape.latent is not None:
        outside += _small_states(shape.latent, numbers)
    if not shape.has_experts(number):
        # Gate and up, the gate's activation, and their product.
        inside += 4 * numbers.number * shape.ffn
        return _Layer(outside, inside / tensor)
    shared = int(size.get("moe_shared_expert_intermediate_size", 0))
    inside += 4 * numbers.number * shared
    if size.get("moe_shared_expert_gate"):
        outside += numbers.number * hidden
    is_fp32 = "moe_router_dtype" in (*size, *layout.megatron_config)
    outside += _router(shape, numbers, is_fp32=is_fp32) + _routed(shape, layout, numbers)
    topk, ranks = int(size["moe_router_topk"]), layout.expert_tensor_ranks
    # Rows as they are sent, as their experts return them, sorted by rank, and as they come back.
    sent = numbers.number * hidden * topk
    dispatched = sent + (3 * sent * ranks if layout.expert_ranks > 1 else 0)
    own = shape.num_experts // layout.expert_model_parallel_size
    of_experts = 2 * numbers.number * own * hidden * int(size["moe_ffn_hidden_size"]) // ranks
    return _Layer(outside, inside / tensor, dispatched, of_experts)


def _routed(shape: Shape, layout: MegatronConfig, numbers: _Numbers) -> int:
    """Of a token's rows: each as it came, what lies between its matrices, its weight and its index."""
    size, ranks = shape.sizes, layout.expert_tensor_ranks
    hidden, width = shape.hidden, int(size["moe_ffn_hidden_size"]) // ranks
    wide = 1
    if layout.expert_ranks > 1:
        # What its expert returned, and of several ranks' sum all parts: autograd keeps what it copies.
        wide += 2 if ranks > 1 else 1
    # Both inner layers, the activation, the product and that with the weight; of a clamped gate all steps.
    inner = (5 if shape.gate.limit is None else 8) * width
    return int(size["moe_router_topk"]) * ranks * (numbers.number * (wide * hidden + inner + 1) + 2 * _INT64)


def _attention(shape: Shape, numbers: _Numbers) -> int:
    """Rotated queries and keys, values, and the output twice; a norm of queries and keys, these as well."""
    size, latent = shape.sizes, shape.latent
    heads = shape.heads
    if latent is not None:
        width = latent.positioned + latent.other
        # Values are padded to the width of queries and keys, and so is the output before it is cut.
        return numbers.number * heads * (2 * width + 2 * max(width, latent.value) + latent.value)
    queries, keys = (shape.channels * n for n in (heads, shape.groups))
    bytes_of_heads = numbers.number * (3 * queries + 2 * keys)
    if size.get("qk_layernorm"):
        bytes_of_heads += (numbers.norm - numbers.number) * (queries + keys)
    if shape.family.gates_attention:
        # The gate lies between the queries; its sigmoid, and the product.
        bytes_of_heads += 3 * numbers.number * queries
    return bytes_of_heads


def _linear_attention(shape: Shape, numbers: _Numbers) -> int:
    """Of a gated delta net, which computes in fp32: what is convolved, what heads get and give, and chunks.

    Of a chunk of C tokens a head keeps five matrices [C, C], and the state before it.
    """
    delta = shape.delta
    assert delta is not None, "its family has such layers"
    heads, values = delta.value_heads, delta.rows("v")[0]
    mixed, keys = sum(delta.rows("qkv")), heads * delta.key_channels
    # Convolved, activated, and in fp32; queries and keys of heads that share them, twice.
    inputs = (2 * numbers.number + _FP32) * mixed + 2 * _FP32 * sum(delta.rows("qk"))
    # Keys and queries of all value heads, four times; what values become, the norm and the gate.
    of_heads = 4 * _FP32 * keys + (5 * _FP32 + 3 * numbers.number) * values
    of_chunks = _FP32 * heads * (5 * CHUNK + delta.key_channels * delta.value_channels // CHUNK)
    return inputs + of_heads + of_chunks


def _small_states(latent: Latent, numbers: _Numbers) -> int:
    """The norms of the small states of multi-latent attention."""
    return numbers.norm * (latent.queries + latent.keys_and_values)


def _router(shape: Shape, numbers: _Numbers, *, is_fp32: bool) -> int:
    """Scores in fp32, the chosen experts and their order, and weights.

    is_fp32: its logits are in fp32, and by sigmoid they always are: then also the token in fp32.
    """
    size = shape.sizes
    topk = int(size["moe_router_topk"])
    router = _FP32 * shape.num_experts + (3 * _INT64 + 3 * _FP32) * topk
    is_fp32 = is_fp32 or size.get("moe_router_score_function") == "sigmoid"
    if is_fp32 and numbers.number != _FP32:
        router += _FP32 * shape.hidden
    return router
