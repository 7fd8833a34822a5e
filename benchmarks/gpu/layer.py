"""One layer of Qwen3-30B-A3B under Megatron: forward and backward, and their share of the matrix rate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.trainer.batch import MicroBatch, micro_batches
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import JSON
from agentrl.weights.hf.source import Operations
from benchmarks.batches import batch_of
from benchmarks.gpu import card
from benchmarks.gpu.job import Bench
from benchmarks.gpu.timing import repeated

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig

    from agentrl.trainer.megatron.passes import Passes

_SIZES: Final = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Of Qwen/Qwen3-30B-A3B."""
_TINY: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_VOCAB = 2048
"""So few that embedding and head are a small part of the work; the operations of the head are counted."""
_LENGTHS, _TINY_LENGTHS = (4096,) * 4, (48,) * 4
_FORWARD_AND_BACKWARD = 3
_SPREAD = 0.02


async def run(bench: Bench) -> None:
    """The rows of a pass forward, and of one forward and backward, of one row of sequences."""
    # Imported before the turn.
    from agentrl.trainer.megatron.parallel import joined

    turn, lengths = bench.turn(), _TINY_LENGTHS if bench.spec.tiny else _LENGTHS
    config, layout = _config(tiny=bench.spec.tiny), MegatronConfig()
    batch = batch_of(lengths, _VOCAB)
    rows = micro_batches(batch.samples, [sample.loss_mask for sample in batch.samples], sum(lengths))
    operations = Operations.of(config)
    assert operations is not None, "its layers are counted"
    flops = operations.forward(lengths, batch.num_loss_tokens)
    with joined(layout, 0, store=HashStore(), local_rank=0):
        passes = _passes(config, layout, bf16=bench.spec.device == "cuda")
        for name, count, work in (
            ("forward", 1, partial(passes.forward, rows)),
            ("forward and backward", _FORWARD_AND_BACKWARD, partial(passes.learn, rows, _loss)),
        ):
            bench.quiet()
            timed = await repeated(_synchronized(work), bench.left_s / 2)
            per_s = count * flops / timed.median
            share = per_s / turn.matmul if turn.matmul else 0.0
            tokens_per_s = sum(lengths) / timed.median
            line = f"{tokens_per_s:,.0f} tokens/s, {share:.1%} of the matrix rate ({timed})"
            figures: dict[str, JSON] = {
                "tokens": sum(lengths),
                "tokens_per_s": tokens_per_s,
                "model_tflops": per_s / 1e12,
                "of_matmul": share,
                **timed.figures(),
            }
            bench.row(f"30B-A3B layer {name}", line, figures, {"tokens_per_s": tokens_per_s})


def _config(*, tiny: bool) -> Qwen3MoeConfig:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=_VOCAB,
        num_hidden_layers=1,
        norm_topk_prob=True,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.update(_TINY if tiny else _SIZES)
    return config


def _passes(config: Qwen3MoeConfig, layout: MegatronConfig, *, bf16: bool) -> Passes:
    """Of a network with random weights, whose routers spread their tokens about evenly."""
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.shape import shape_of, tensor_shapes_of
    from agentrl.trainer.megatron.passes import Passes

    shape = shape_of(config)
    shapes, generator = tensor_shapes_of(shape, config), torch.Generator().manual_seed(0)

    def read(name: str) -> Tensor:
        if len(shapes[name]) == 1:
            return torch.ones(shapes[name])
        return _SPREAD * torch.randn(shapes[name], generator=generator)

    network = Network(shape, layout, bf16=bf16)
    network.load(read)
    return Passes(network)


def _loss(_row: MicroBatch, outputs: TokenOutputs) -> LossOutput:
    return LossOutput(-outputs.logp_N.sum(), {})


def _synchronized(work: Callable[[], Sequence[object]]) -> Callable[[], Awaitable[None]]:
    async def done() -> None:
        work()
        card.synchronize()

    return done
