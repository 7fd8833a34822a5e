"""This rank's part of a model: built by Megatron from a checkpoint's config, loaded from its files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn.functional import silu

from agentrl.losses import OutputHead
from agentrl.trainer.megatron.arguments import FIXED, Target, chosen
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.hooks import make_model
from agentrl.trainer.megatron.model.ahead import AheadLayers, first_stages
from agentrl.trainer.megatron.model.families import VALUE_HEAD, Placed
from agentrl.trainer.megatron.model.feed_forward import RMSNorm
from agentrl.trainer.megatron.model.layers import layer_spec, number_experts
from agentrl.trainer.megatron.model.shape import Shape
from agentrl.trainer.megatron.model.vocabulary import head_shard

Read = Callable[[str], Tensor]
"""A tensor of a checkpoint, by its Hugging Face name."""


class Piece(NamedTuple):
    """A parameter of this rank, and its rule for a checkpoint's tensors."""

    placed: Placed
    parameter: nn.Parameter


class Network:
    """The stages of the pipeline that this rank has, in their order; one unless there are virtual ones.

    The parallel state must be initialized, and the layout checked (`check_layout`). Parameters are fp32 (with
    bf16: bfloat16) and uninitialized until `load`.
    """

    def __init__(self, shape: Shape, layout: MegatronConfig, *, bf16: bool) -> None:
        self.shape, self.layout = shape, layout
        self.config = transformer_config(shape, layout, bf16=bf16)
        count = layout.num_virtual_stages_per_pipeline_rank
        stages = [None] if count == 1 else list(range(count))
        self.stages: list[GPTModel] = [self._stage(number) for number in stages]
        for placed, parameter in self.pieces():
            # Megatron sets this mark where it initializes weights at random, which is off here. Without it
            # the norm of the gradient counts the shards of one rank only. No two ranks of the group that the
            # norm over experts is summed in have the same part of one.
            is_cut = placed.rule.is_cut or placed.expert is not None
            vars(parameter)["tensor_model_parallel"] = is_cut
            if placed.expert is not None and not placed.rule.is_cut:
                # Of what the ranks of an expert all have, the norm counts the first one's.
                vars(parameter)["shared"] = parallel_state.get_expert_tensor_parallel_rank() > 0

    def pieces(self) -> Iterator[Piece]:
        """This rank's parameters, each once, in the order of the rules: those of one tensor together.

        Those that predict further ahead come last: the policy alone may have some.
        """
        placed_by_name = {placed.megatron: placed for placed in self.shape.rules()}
        places = {name: number for number, name in enumerate(placed_by_name)}
        yield from sorted(self._pieces(placed_by_name), key=lambda piece: places[piece.placed.megatron])

    def _pieces(self, placed_by_name: Mapping[str, Placed]) -> Iterator[Piece]:
        for stage in self.stages:
            first = get_transformer_layer_offset(self.config, vp_stage=stage.vp_stage)
            for name, parameter in stage.named_parameters():
                placed = placed_by_name.get(_global(name, first))
                # With tied embeddings the last stage keeps a copy of them for the head.
                if placed is None and name == "output_layer.weight":
                    placed = placed_by_name["embedding.word_embeddings.weight"]
                if placed is None:
                    raise KeyError(
                        f"no rule makes Megatron's parameter {name}; add one to the family's table"
                    )
                yield Piece(placed, parameter)

    def freeze(self, learning: Collection[Placed]) -> None:
        """Have these parameters learn, and a critic's head; the others get no gradient."""
        for placed, parameter in self.pieces():
            parameter.requires_grad_(placed in learning or placed.hf == (VALUE_HEAD,))
        first = self.stages[0]
        if first.pre_process:
            # Layers above a frozen embedding learn from states that have a gradient; so do later stages.
            first.embedding.forward = partial(_with_gradient, first.embedding.forward)

    @torch.no_grad()
    def load(self, read: Read, *, is_resumed: bool = False) -> None:
        """Fill the parameters from a checkpoint, one after the other, each cast to its dtype.

        is_resumed: only those that learn.
        """
        # A tensor with several parameters in it is read once.
        read = lru_cache(1)(read)
        for placed, parameter in self.pieces():
            if is_resumed and not parameter.requires_grad:
                continue
            shard = self.shard_of(placed, read)
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"{placed.megatron} is {tuple(parameter.shape)} here, the checkpoint gives "
                    f"{tuple(shard.shape)}"
                )
            parameter.copy_(shard)

    def shard_of(self, placed: Placed, read: Read) -> Tensor:
        """This tensor rank's shard of a parameter, from a checkpoint's tensors."""
        rank: int = parallel_state.get_tensor_model_parallel_rank()
        if placed.expert is not None:
            rank = parallel_state.get_expert_tensor_parallel_rank()
        ranks = self.layout.sharding_ranks(placed.expert)
        unsharded = placed.rule.join([read(name) for name in placed.hf], self.shape.dims(ranks))
        shards: Sequence[Tensor] = placed.rule.cut(unsharded, ranks)
        return shards[rank]

    @property
    def head(self) -> OutputHead:
        """The last stage's part of the layer over the vocabulary."""
        last = self.stages[-1]
        weight: Tensor = (
            last.shared_embedding_or_output_weight() if self.shape.tied else last.output_layer.weight
        )
        return head_shard(weight, self.shape.vocab)

    @property
    def ahead(self) -> AheadLayers:
        """The last stage's layers that predict further ahead."""
        layers: AheadLayers = self.stages[-1].mtp
        return layers

    @contextmanager
    def fetched_embedding(self) -> Iterator[None]:
        """Have them know the embedding as it is now, in this block; every rank enters it."""
        first, last = self.stages[0], self.stages[-1]
        weight = first.embedding.word_embeddings.weight if first.pre_process else None
        # Of an untied head: it has as many rows.
        like = last.output_layer.weight if last.post_process else None
        shard = first_stages(weight, like)
        if last.post_process:
            self.ahead.embedding = shard
        yield
        if last.post_process:
            self.ahead.embedding = None

    @property
    def value_weight(self) -> Tensor:
        """[1, width]: a critic's head, the same on every tensor rank of the last stage."""
        weight: Tensor = self.stages[-1].output_layer.weight
        return weight

    def _stage(self, number: int | None) -> GPTModel:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        numbers = self.layout.stages_of(rank, len(self.shape.experts_by_layer))[number or 0]
        spec = TransformerBlockSubmodules(
            layer_specs=[layer_spec(self.shape, number) for number in numbers],
            layer_norm=RMSNorm,
        )
        stage = make_model(
            self.layout,
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=self.shape.dims(self.layout.tensor_model_parallel_size).padded_vocab,
            max_sequence_length=self.shape.max_length,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=self.shape.tied,
            # The layers rotate by themselves, see `PackedRow`.
            position_embedding_type="none",
            vp_stage=number,
        )
        for place, layer in zip(numbers, stage.decoder.layers, strict=True):
            number_experts(layer, self.shape, place)
        if first and self.shape.embedding_scale is not None:
            scaled = partial(_scaled, stage.embedding.forward, scale=self.shape.embedding_scale)
            stage.embedding.forward = scaled
        if first and self.shape.pad is not None:
            ranks = self.layout.tensor_model_parallel_size if self.layout.sequence_parallel else 1
            embed = partial(_without_pad, stage.embedding.forward, pad=self.shape.pad, ranks=ranks)
            stage.embedding.forward = embed
        if last and self.shape.critic:
            stage.output_layer = _ValueHead(self.config)
        if last:
            # The head runs in `outputs`, at predicted tokens only: the stage returns hidden states.
            stage.output_layer.forward = _identity
        if last and self.shape.ahead:
            stage.mtp = AheadLayers(self.config, self.shape, number)
        return stage.to(compute_device())


class _ValueHead(nn.Module):
    """A critic's head, of one output."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))


def transformer_config(shape: Shape, layout: MegatronConfig, *, bf16: bool) -> TransformerConfig:
    """Megatron's config: the checkpoint's sizes, the layout, and the settings that all models share."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    virtual = layout.num_virtual_stages_per_pipeline_rank
    fields: dict[str, object] = {
        **FIXED,
        "activation_func": silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        # In a pipeline of two ranks the next and the previous rank are the same one: sent in one batch,
        # activations and gradients would be mixed up, and so would their shapes.
        "variable_seq_lengths": virtual == 1,
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": None if virtual == 1 else virtual,
        "num_layers_in_first_pipeline_stage": layout.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": layout.decoder_last_pipeline_num_layers,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_ranks,
        "sequence_parallel": layout.sequence_parallel,
        "recompute_granularity": layout.recompute_granularity,
    }
    if layout.recompute_granularity == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**{**fields, **shape.sizes, **chosen(layout, Target.MODEL)})


def _global(name: str, first_layer: int) -> str:
    """A parameter's name, with its layer's number over all stages."""
    head, layers, rest = name.partition("decoder.layers.")
    if head or not layers:
        return name
    number, _, rest = rest.partition(".")
    return f"decoder.layers.{int(number) + first_layer}.{rest}"


def _without_pad(
    embed: Callable[..., Tensor], input_ids: Tensor, position_ids: Tensor, *, pad: int, ranks: int
) -> Tensor:
    """The embeddings [tokens, rows, width] of [rows, tokens]; those of `pad` have no gradient, as in torch.

    ranks: the tensor ranks that shard the tokens.
    """
    embedded = embed(input_ids=input_ids, position_ids=position_ids)
    is_pad = (input_ids == pad).transpose(0, 1)
    if ranks > 1:
        is_pad = is_pad.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(is_pad[..., None], embedded.detach(), embedded)


def _scaled(embed: Callable[..., Tensor], *, scale: float, **inputs: Tensor) -> Tensor:
    embedded = embed(**inputs)
    # Rounded as the model's numbers are.
    return embedded * float(torch.tensor(scale, dtype=embedded.dtype))


def _with_gradient(embed: Callable[..., Tensor], **inputs: Tensor) -> Tensor:
    embedded = embed(**inputs)
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


def _identity(hidden: Tensor, **_: object) -> tuple[Tensor, None]:
    return hidden, None
