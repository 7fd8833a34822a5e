"""The model's tensors, fused for few and large multiplications, and read back under their own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.layers import Linear, RmsNorm

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ROTATED = _QKV[:2]
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_OUT = ("self_attn.o_proj",)
_DOWN = ("mlp.down_proj",)

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
"""The names of the tensors outside of the layers."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParameters:
    """One layer. qk_norm's weight: [query and key heads, head_dim]; None where the model has none."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    out: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class OuterParameters:
    """The tensors outside of the layers. embedding: [tokens, width]."""

    embedding: Tensor
    norm: RmsNorm
    head: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """All weights, in memory of their own: training the source model does not change them.

    Norms are kept in fp32, rounded to the dtype of the other weights.
    """

    architecture: Architecture
    outer: OuterParameters
    layers: tuple[LayerParameters, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.outer.embedding.dtype

    @property
    def vocab_size(self) -> int:
        """The tokens of the vocabulary (count)."""
        return self.architecture.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of a sequence."""
        return self.architecture.max_position_embeddings

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the model, by its Hugging Face name."""
        return self.architecture.shapes()

    @classmethod
    def load(
        cls, architecture: Architecture, tensors: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Parameters:
        """Fuse the tensors that `architecture.shapes()` names, cast to `dtype`."""
        layers = (load_layer(architecture, tensors, dtype, n) for n in range(architecture.num_layers))
        return cls(architecture, load_outer(architecture, tensors, dtype), tuple(layers))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its Hugging Face name, read back from what the decoder multiplies with."""
        yield from outer_tensors(self.outer)
        for n, layer in enumerate(self.layers):
            yield from layer_tensors(self.architecture, layer, self.outer.embedding.dtype, n)


def load_outer(
    architecture: Architecture, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> OuterParameters:
    """Embedding, last norm and head."""
    embedding = load_embedding(tensors, dtype)
    head = Linear(embedding) if architecture.tied else load_head(tensors, dtype)
    return OuterParameters(embedding, load_norm(architecture, tensors, dtype), head)


def load_embedding(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """[tokens, width], a copy."""
    return tensors[EMBEDDING].detach().to("cpu", dtype, copy=True)


def load_norm(architecture: Architecture, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> RmsNorm:
    """The last norm."""
    return RmsNorm(_rounded(tensors[NORM], dtype), architecture.rms_norm_eps)


def load_head(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Linear:
    """The head of a model with untied embeddings."""
    return Linear(_cast(tensors, HEAD, dtype))


def outer_tensors(outer: OuterParameters) -> Iterator[tuple[str, Tensor]]:
    """The tensors outside of the layers, read back; the head also where it is tied."""
    yield EMBEDDING, outer.embedding
    yield NORM, outer.norm.weight.to(outer.embedding.dtype)
    yield HEAD, outer.head.dense()


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in fp32, rounded to `dtype`."""
    return tensor.detach().to("cpu", dtype).to(torch.float32, copy=True)


def _cast(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    return tensors[name].detach().to("cpu", dtype)


def load_layer(
    architecture: Architecture, tensors: Mapping[str, Tensor], dtype: torch.dtype, index: int
) -> LayerParameters:
    """Layer `index`, fused."""
    prefix = prefix_of(index)

    def cast(name: str) -> Tensor:
        return _cast(tensors, prefix + name, dtype)

    def fuse(names: tuple[str, ...]) -> Linear:
        weight = _stacked([turned(name, cast(f"{name}.weight")) for name in names])
        biased = prefix + f"{names[0]}.bias" in tensors
        bias = torch.cat([turned(name, cast(f"{name}.bias")) for name in names]) if biased else None
        return Linear(weight, bias)

    def turned(name: str, tensor: Tensor) -> Tensor:
        return pair_up(tensor, architecture.head_dim) if name in _ROTATED else tensor

    def norm(name: str) -> RmsNorm:
        return RmsNorm(rounded(name), architecture.rms_norm_eps)

    def rounded(name: str) -> Tensor:
        return _rounded(tensors[f"{prefix}{name}.weight"], dtype)

    qk_norm = None
    if architecture.qk_norm:
        q, k = rounded("self_attn.q_norm"), rounded("self_attn.k_norm")
        heads = (architecture.num_heads, architecture.num_kv_heads)
        paired = (pair_up(q, architecture.head_dim), pair_up(k, architecture.head_dim))
        weight = torch.cat([w.expand(n, -1) for w, n in zip(paired, heads, strict=True)])
        qk_norm = RmsNorm(weight, architecture.rms_norm_eps)
    return LayerParameters(
        input_norm=norm("input_layernorm"),
        qkv=fuse(_QKV),
        qk_norm=qk_norm,
        out=fuse(_OUT),
        post_norm=norm("post_attention_layernorm"),
        gate_up=fuse(_GATE_UP),
        down=fuse(_DOWN),
    )


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """The rows of all matrices; not copied where they are adjacent in memory already, as in buckets."""
    adjacent = all(
        after.data_ptr() == before.data_ptr() + before.nbytes for before, after in pairwise(matrices)
    )
    storages = {matrix.untyped_storage().data_ptr() for matrix in matrices}
    if not adjacent or len(storages) > 1 or not all(matrix.is_contiguous() for matrix in matrices):
        return torch.cat(list(matrices))
    first = matrices[0]
    return first.as_strided((sum(map(len, matrices)), first.shape[1]), first.stride())


def prefix_of(index: int) -> str:
    """The prefix of the names of layer `index`."""
    return f"model.layers.{index}."


def pair_up(tensor: Tensor, head_dim: int) -> Tensor:
    """Order each head's rows so that the pairs which RoPE rotates together are adjacent.

    Hugging Face rotates row i with row i + head_dim / 2. Queries and keys are reordered alike, so their
    products do not change; and adjacent pairs are complex numbers, rotated by one product.
    """
    return tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def undo_pairs(tensor: Tensor, head_dim: int) -> Tensor:
    """The inverse of `pair_up`."""
    return tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def layer_tensors(
    architecture: Architecture, layer: LayerParameters, dtype: torch.dtype, index: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of layer `index`, read back."""
    for name, tensor in _parts(architecture, layer):
        yield f"{prefix_of(index)}{name}", tensor.to(dtype)


def _parts(architecture: Architecture, layer: LayerParameters) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm.weight
    yield "post_attention_layernorm.weight", layer.post_norm.weight
    head_dim = architecture.head_dim
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", undo_pairs(layer.qk_norm.weight[0], head_dim)
        yield "self_attn.k_norm.weight", undo_pairs(layer.qk_norm.weight[architecture.num_heads], head_dim)
    shapes = architecture.shapes()
    fused = ((_QKV, layer.qkv), (_OUT, layer.out), (_GATE_UP, layer.gate_up), (_DOWN, layer.down))
    for names, linear in fused:
        sizes = [shapes[f"model.layers.0.{name}.weight"][0] for name in names]
        for name, weight in zip(names, linear.dense().split(sizes), strict=True):
            yield f"{name}.weight", undo_pairs(weight, head_dim) if name in _ROTATED else weight
        if linear.bias_O is not None:
            for name, bias in zip(names, linear.bias_O.split(sizes), strict=True):
                yield f"{name}.bias", undo_pairs(bias, head_dim) if name in _ROTATED else bias
