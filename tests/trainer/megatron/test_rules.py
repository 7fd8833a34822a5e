"""A checkpoint's tensors come back from Megatron's shards bit by bit, in every family."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron.model.families import FAMILIES
from agentrl.trainer.megatron.model.rules import (
    Dims,
    GateUp,
    Qkv,
    Run,
    Same,
    Stacked,
    Swapped,
    Vocabulary,
    unshard,
)
from agentrl.trainer.megatron.model.shape import shape_of
from tests.trainer.megatron.models import CONFIGS, checkpoint_of, model_of


def weights_of(model):
    """Of its checkpoint, without another name of a tied one."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in checkpoint_of(model).items() if name not in tied}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back_is_the_same_bits(kind, ranks, dtype):
    model = model_of(kind).to(dtype)
    shape, state = shape_of(model.config), weights_of(model)
    dims, tensors = shape.dims(ranks), dict[str, torch.Tensor]()
    for placed in shape.rules():
        expected = [state[name].detach() for name in placed.hf]
        shards = placed.rule.cut(placed.rule.join(expected, dims), ranks)
        assert len({shard.shape for shard in shards}) == 1
        assert len(shards) == ranks
        for name, tensor in zip(placed.hf, expected, strict=True):
            # Experts may write into one tensor, each its part.
            tensors.setdefault(name, torch.full_like(tensor, torch.nan))
        for number, shard in enumerate(shards):
            assert shard.dtype == dtype
            unshard(placed.rule, shard, Run(number, ranks), [tensors[name] for name in placed.hf], dims)
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_queries_keys_and_values_lie_group_by_group():
    # Two groups of two heads with one channel: the queries of a group, its key, its value.
    dims = Dims(query_groups=2, kv_channels=1, padded_vocab=0)
    q, k, v = torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6]), torch.tensor([7.0, 8])
    joined = Qkv("x", "{}").join([q, k, v], dims)
    assert joined.tolist() == [1, 2, 5, 7, 3, 4, 6, 8]
    assert [shard.tolist() for shard in Qkv("x", "{}").cut(joined, 2)] == [[1, 2, 5, 7], [3, 4, 6, 8]]


def test_each_rank_has_its_run_of_the_gate_and_of_the_other():
    dims = Dims(1, 1, 0)
    rule = GateUp("x", ("gate", "up"))
    joined = rule.join([torch.tensor([1.0, 2]), torch.tensor([3.0, 4])], dims)
    assert [shard.tolist() for shard in rule.cut(joined, 2)] == [[1, 3], [2, 4]]


def test_the_rows_of_a_stacked_expert_alternate_and_its_matrix_lies_transposed():
    dims, stack = Dims(1, 1, 0), numbered(2, 3, 4)
    rule = Stacked(GateUp("x", ("y",)), expert=1)
    joined = rule.join([stack], dims)
    assert torch.equal(joined, stack[1].T[[0, 2, 1, 3]])
    assert [shard[:, 0].tolist() for shard in rule.cut(joined, 2)] == [[12, 13], [14, 15]]


def test_a_vocabulary_is_filled_up_with_zeros_and_cut_back():
    dims = Dims(1, 1, padded_vocab=4)
    rule = Vocabulary("x", "y")
    joined = rule.join([numbered(3, 2)], dims)
    assert joined[3].tolist() == [0, 0]
    assert [len(shard) for shard in rule.cut(joined, 2)] == [2, 2]
    for ranks, rows in ((2, 4), (4, 8)):
        tensor = torch.zeros(3, 2)
        padded = Dims(1, 1, padded_vocab=rows)
        for number, shard in enumerate(rule.cut(rule.join([numbered(3, 2)], padded), ranks)):
            unshard(rule, shard, Run(number, ranks), [tensor], padded)
        assert torch.equal(tensor, numbered(3, 2))


def test_halves_of_columns_change_places():
    dims, rule = Dims(1, 1, 1, 0), Swapped("x", "y")
    joined = rule.join([numbered(2, 4)], dims)
    assert joined.tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]
    assert all(shard is joined for shard in rule.cut(joined, 2))
    tensor = torch.zeros(2, 4)
    unshard(rule, joined, Run(0, 2), [tensor], dims)
    assert torch.equal(tensor, numbered(2, 4))


def test_what_cannot_be_shared_evenly_is_a_sentence():
    with pytest.raises(ValueError, match="3 rows or columns cannot be shared evenly by 2 tensor ranks"):
        Same("x", "y", along=1).cut(numbered(2, 3), 2)


def test_every_family_is_tried_here():
    assert {kind.split(",")[0] for kind in CONFIGS} == set(FAMILIES)
