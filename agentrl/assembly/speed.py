"""How long Megatron's ranks take for their rows, and servers for their tokens, from shapes: a rough model.

A rank's pass through a layer takes the sum of four times, of which none is hidden behind another:

    products     operations over the rate of dense products, of grouped ones, and of attention
    memory       what a layer keeps (`row_memory`) is read or written once
    tensor       gathers and scatters of the tensor ranks; keys and values of the context ranks
    experts      rows to experts and back, as far as they leave the rank or the machine

A backward pass is two of these, and recomputed layers are one more. A pipeline of P ranks with V stages each
waits for (P - 1) / (rows x V) of that. Then gradients are summed, weights gathered, and the optimizer reads
and writes its state once; on the CPU with the bandwidth of the machine's memory.

Experts are taken to get equally many tokens. Constants are in `H100` and below, each with its source; those
that are called chosen were chosen before and with the three published rates that tests/assembly/test_speed.py
compares with, which are within 30%; those of servers with the steps of tests/simulate/test_published.py in
view, before they were simulated. It serves to compare layouts: nothing of it has been measured here.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from transformers import PreTrainedConfig

from agentrl.assembly.memory import BF16, FP32, cache_bytes
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.rules import CHUNK
from agentrl.trainer.megatron.model.shape import Shape, shape_of
from agentrl.trainer.megatron.row_memory import layer_bytes
from agentrl.weights.hf.tensors import num_parameters


class Hardware(NamedTuple):
    """A GPU and its machine. peak: bfloat16 (FLOP/s). memory, inside, across, cpu: of the GPU's memory, to
    another GPU of the machine, to one of another machine, of the machine's own memory (bytes/s).
    per_machine: GPUs (count)."""

    peak: float
    memory: float
    inside: float
    across: float
    cpu: float
    per_machine: int


H100 = Hardware(989e12, 3.35e12, 450e9, 50e9, 400e9, 8)
"""NVIDIA's data sheets of the H100 SXM (NVLink in one direction) and of the DGX H100 (400 Gb/s for each GPU);
the memory of its two CPUs is taken to give two thirds of its 614 GB/s."""

_DENSE, _GROUPED, _ATTENTION = 0.7, 0.6, 0.5
"""Shares of the peak. On an H200 products of 8,192 x 8,192 reached 0.8 (docs/benchmarks.md); the others are
chosen: smaller products, and attention with its backward pass, reach less."""
_LINK, _MEMORY = 0.9, 0.8
"""Shares of the rates of links and of memory: chosen."""
_LAYER_S = 1e-4
"""What a layer takes besides, in each pass: starts of kernels and of exchanges (seconds): chosen."""
_DECODED = 0.6
"""Share of the rate of memory that products of few rows reach: chosen."""
_DECODED_LAYER_S, _SAMPLED_S = 3e-5, 2e-3
"""What a layer takes besides in a server's step, and the step: scheduling, sampling (seconds): chosen."""
_NEAR_S, _FAR_S = 1e-5, 6e-5
"""Latency of a sum over the GPUs of one machine, and of several (seconds): chosen."""
_PREFILLED = 8192
"""Tokens of prompts that a server computes at once."""
_ADAM_BYTES = 32
"""What AdamW reads and writes for a number: gradient, weight and two means in fp32, the weight in bf16."""


class TrainerSpeed(NamedTuple):
    """A rank's times. forward: one pass of a row over all of its layers, waits of the pipeline included;
    learn: forwards, backwards and what is recomputed; step: of an optimizer step besides (seconds)."""

    forward: float
    learn: float
    step: float


class Work(NamedTuple):
    """What a replica computes between two optimizer steps. rows: count; tokens: of each; length: of a
    sequence in them. sends_once: a token goes to another machine once, and not for each of its experts there,
    as DeepEP does; this exchange does not."""

    rows: float
    tokens: int
    length: float
    sends_once: bool = False


def trainer_speed(
    policy: PreTrainedConfig,
    layout: MegatronConfig,
    work: Work,
    hardware: Hardware = H100,
    *,
    offloads: bool = False,
) -> TrainerSpeed:
    """offloads: the optimizer is in the CPU's memory."""
    shape = shape_of(policy)
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.num_virtual_stages_per_pipeline_rank
    number = len(shape.experts_by_layer)
    by_rank = [
        sum(
            _layer_s(shape, layout, work, hardware, layer) for layer in chain(*layout.stages_of(rank, number))
        )
        for rank in range(pipeline)
    ]
    own = work.tokens / layout.context_parallel_size
    head = 2 * own * shape.vocab * shape.hidden / layout.tensor_model_parallel_size
    waits = 1 + (pipeline - 1) / (max(work.rows, 1) * virtual)
    by_rank[-1] += head / (_DENSE * hardware.peak)
    # Ranks wait for the slowest one.
    forward = waits * max(by_rank)
    passes = 4 if layout.recompute_granularity == "full" else 3
    step = _step_s(policy, layout, hardware, offloads=offloads)
    return TrainerSpeed(forward, passes * forward, step)


def tokens_per_s(
    policy: PreTrainedConfig, layout: MegatronConfig, work: Work, *, offloads: bool = False
) -> float:
    """Tokens of rows that all GPUs together learn from in a second, on machines of `H100`."""
    speed = trainer_speed(policy, layout, work, offloads=offloads)
    tokens = layout.data_parallel_size * work.rows * work.tokens
    return tokens / (work.rows * speed.learn + speed.step)


class EngineSpeed(NamedTuple):
    """A server's times. step: of a decoding step, without what each of its requests adds; request: that
    (seconds). prefill: tokens of prompts (tokens/s)."""

    step: float
    request: float
    prefill: float


def engine_speed(
    policy: PreTrainedConfig, gpus: int, requests: float, length: float, hardware: Hardware = H100
) -> EngineSpeed:
    """A server of SGLang in bfloat16, whose GPUs shard every matrix.

    A step takes the sum of these: weights and what is cached are read; its tokens are multiplied; in each
    layer two sums over the GPUs. requests: that are decoded at once; length: their mean so far (counts). Few
    tokens need few of the experts: the line is through the steps of all requests and of half of them.
    """
    half, whole = (
        _pass_s(policy, gpus, part * requests, part * requests * length, hardware) for part in (0.5, 1.0)
    )
    each = (whole - half) / (0.5 * requests)
    prompts = _pass_s(policy, gpus, _PREFILLED, 0.0, hardware)
    return EngineSpeed(whole - requests * each, each, _PREFILLED / prompts)


def _pass_s(policy: PreTrainedConfig, gpus: int, tokens: float, cached: float, hardware: Hardware) -> float:
    """A server's pass. tokens: that it computes; cached: that these look back at (counts)."""
    shape, experts = shape_of(policy), _expert_parameters(policy)
    layers = len(shape.experts_by_layer)
    # One row of the embedding is read for a token; tied, it is the head.
    embedding = 0 if policy.tie_word_embeddings else shape.vocab * shape.hidden
    read = used = float(num_parameters(policy) - experts - embedding)
    if experts:
        chosen = int(shape.sizes["moe_router_topk"]) / shape.num_experts
        read += experts * (1 - (1 - chosen) ** tokens)
        used += experts * chosen
    seconds = _SAMPLED_S + layers * _DECODED_LAYER_S
    seconds += (BF16 * read / gpus + cached * cache_bytes(policy, gpus)) / (_DECODED * hardware.memory)
    seconds += 2 * tokens * used / gpus / (_DENSE * hardware.peak)
    if gpus > 1:
        latency = _NEAR_S if gpus <= hardware.per_machine else _FAR_S
        summed = 2 * BF16 * tokens * shape.hidden / _link(hardware, gpus)
        seconds += 2 * layers * (latency + summed)
    return seconds


def _expert_parameters(policy: PreTrainedConfig) -> int:
    """Of all routed experts (count)."""
    shape = shape_of(policy)
    layers = sum(n > 0 for n in shape.experts_by_layer)
    return layers * shape.num_experts * 3 * shape.hidden * int(shape.sizes.get("moe_ffn_hidden_size", 0))


def _layer_s(shape: Shape, layout: MegatronConfig, work: Work, hardware: Hardware, number: int) -> float:
    """A forward pass of a row through a layer. number: of the layer."""
    has_experts, layer = bool(shape.experts_by_layer[number]), shape.attention_by_layer[number]
    size, tensor, context = shape.sizes, layout.tensor_model_parallel_size, layout.context_parallel_size
    own, hidden = work.tokens / context, shape.hidden
    attention, width = _linear_attention(shape) if layer.is_linear else _attention(shape)
    matrices = attention + 3 * hidden * shape.ffn
    seconds = _LAYER_S
    if has_experts:
        shared = int(size.get("moe_shared_expert_intermediate_size", 0))
        matrices = attention + hidden * (3 * shared + shape.num_experts)
        routed = 6 * own / tensor * int(size["moe_router_topk"]) * hidden * int(size["moe_ffn_hidden_size"])
        seconds += routed / (_GROUPED * hardware.peak) + _exchange_s(shape, layout, work, hardware)
    seconds += 2 * own * matrices / tensor / (_DENSE * hardware.peak)
    # A token attends to half of its sequence on average; of a gated delta net, width is of one token.
    seen = work.length if layer.window is None else min(work.length, 2 * layer.window)
    seconds += own * (2 if layer.is_linear else seen) * width / tensor / (_ATTENTION * hardware.peak)
    kept = layer_bytes(shape, layout, work.tokens, number, bf16=True)
    seconds += kept / (_MEMORY * hardware.memory)
    # Attention and feed-forward blocks gather and scatter; routed experts have an exchange of their own.
    blocks = 1 if has_experts and not size.get("moe_shared_expert_intermediate_size") else 2
    gathered = 2 * blocks * BF16 * hidden * own * (tensor - 1) / tensor
    keys = 2 * BF16 * own * (context - 1) * _cached(shape) / tensor
    if layer.is_linear and shape.delta is not None:
        # Queries, keys, values and the two gates of a head there, and what was read back.
        exchanged = sum(shape.delta.rows("qkvvba"))
        keys = BF16 * own * exchanged * (context - 1) / context / tensor
    seconds += gathered / _link(hardware, tensor) + keys / _link(hardware, tensor * context)
    return seconds


def _linear_attention(shape: Shape) -> tuple[int, int]:
    """Elements of the matrices of a gated delta net, and multiplications of a token."""
    delta, hidden = shape.delta, shape.hidden
    assert delta is not None, "its family has such layers"
    matrices = hidden * sum(delta.rows("qkvvzba"))
    keys, values = delta.key_channels, delta.value_channels
    # Three with the state; in a chunk keys and queries with keys, the system's solution, and the scores.
    return matrices, delta.value_heads * (3 * keys * values + CHUNK * (5 * keys + 3 * values) // 2)


def _attention(shape: Shape) -> tuple[int, int]:
    """Elements of the matrices of attention, and multiplications of a pair of tokens."""
    latent, hidden, heads = shape.latent, shape.hidden, shape.heads
    if latent is None:
        channels, groups = shape.channels, shape.groups
        gates = heads if shape.family.gates_attention else 0
        return hidden * channels * (2 * (heads + groups) + gates), 2 * heads * channels
    inner = latent.positioned + latent.other
    queries = (hidden + heads * inner) * latent.queries if latent.queries else hidden * heads * inner
    keys = hidden * (latent.keys_and_values + latent.positioned)
    keys += latent.keys_and_values * heads * (latent.other + latent.value)
    return queries + keys + heads * latent.value * hidden, heads * (inner + latent.value)


def _cached(shape: Shape) -> int:
    """Channels of all keys; values are taken to be as many."""
    if shape.latent is not None:
        return shape.heads * (shape.latent.positioned + shape.latent.other)
    return shape.groups * shape.channels


def _exchange_s(shape: Shape, layout: MegatronConfig, work: Work, hardware: Hardware) -> float:
    """Rows to their experts and back. Neighbouring ranks have the experts of a layer together."""
    size, ranks = shape.sizes, layout.expert_ranks
    own = work.tokens / layout.context_parallel_size / layout.tensor_model_parallel_size
    topk = int(size["moe_router_topk"])
    row = 2 * BF16 * own * shape.hidden
    rows = topk * layout.expert_tensor_ranks
    near = min(ranks, hardware.per_machine)
    machines = ranks / near
    far, close = rows * (1 - 1 / machines), rows / machines
    if work.sends_once:
        groups = int(size.get("moe_router_group_topk", 0)) or topk
        distinct = min(_distinct(machines, topk), groups)
        far = distinct * (1 - 1 / machines)
        close = min(rows, _distinct(ranks, topk)) / machines
    close *= 1 - 1 / near
    return row * (close / hardware.inside + far / hardware.across) / _LINK


def _distinct(places: float, drawn: int) -> float:
    """How many of some places are drawn at least once."""
    return places * (1 - (1 - 1 / places) ** drawn)


def _link(hardware: Hardware, ranks: int) -> float:
    """What a rank sends a second in a group of neighbouring ranks (bytes/s)."""
    return _LINK * (hardware.inside if ranks <= hardware.per_machine else hardware.across)


def _step_s(policy: PreTrainedConfig, layout: MegatronConfig, hardware: Hardware, *, offloads: bool) -> float:
    """The sum of gradients, the weights' gather, and the optimizer."""
    total, experts = num_parameters(policy), _expert_parameters(policy)
    pipeline, tensor = layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size
    seconds = 0.0
    for part, ranks, is_expert in (
        (total - experts, tensor, False),
        (experts, layout.expert_ranks, True),
    ):
        own, replicas = part / pipeline / ranks, layout.replicas_of(is_expert)
        rate = _link(hardware, ranks * replicas)
        seconds += (FP32 + BF16) * own * (replicas - 1) / replicas / rate
    if offloads:
        machines = max(layout.world_size / hardware.per_machine, 1)
        return seconds + total / machines * (_ADAM_BYTES / hardware.cpu)
    return seconds + _ADAM_BYTES * total / layout.world_size / (_MEMORY * hardware.memory)
