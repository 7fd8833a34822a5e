"""Several ranks of the torch trainer learn what one process learns, and what a loop in float64 computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.assembly.memory import Networks, torch_memory
from agentrl.trainer.batch import micro_batches
from tests.trainer.pool import Pool
from tests.trainer.sharded import Kind, Ranks, held, updated
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import MASKS, batch, reference_gradient, settings

SHARDED, REPLICATED = Ranks(2, 2), Ranks(2, 1)
OF_FOUR = {"sharded": Ranks(4, 4), "both": Ranks(4, 2), "replicated": Ranks(4, 1)}
ONE = Ranks(1, 1)
# Ragged: more of some rank than of another, in rows of at most 20 tokens.
RAGGED = (*MASKS, *MASKS, [0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1])
# All of it for one rank.
LONELY = ([0, 1, 1, 0, 1],)
KINDS = {
    "packed": Kind("qwen2"),
    "folded": Kind("gemma2"),
    "tied": Kind("qwen3", changes={"gradient_checkpointing": True}),
    "experts": Kind("qwen3_moe"),
    "adapters": Kind("llama", changes={"lora_rank": 2}),
    "adapters of folded": Kind("gemma2", changes={"lora_rank": 1, "lora_target_modules": "q_proj,up_proj"}),
    "frozen": Kind("qwen3", has_critic=True, changes={"freeze_params_name_list": ("embed", r"layers\.0\.")}),
    "critic": Kind("qwen2", has_critic=True),
    "cannot be tried in one row": Kind("stablelm", has_critic=True),
}


@pytest.fixture(scope="module")
def pair():
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with Pool(4) as pool:
        yield pool


def equals_one_process(pool, ranks, kind, masks=RAGGED):
    """Loss, metrics, gradients, scores and published weights."""
    train_batch = with_returns(batch(1, masks))
    parts = pool.meet(updated, ranks, kind, train_batch)
    whole = updated(None, 0, ONE, kind, train_batch)
    scores = {}
    for part in parts:
        assert part.gradients.keys() == whole.gradients.keys()
        for name, gradient in whole.gradients.items():
            error = (part.gradients[name] - gradient).norm()
            assert error <= 1e-6 * gradient.norm() + 1e-9, name
        assert part.steps == {role: pytest.approx(step, rel=1e-6) for role, step in whole.steps.items()}
        assert [*part.weights] == [*whole.weights]
        assert not scores.keys() & part.scores.keys()
        scores |= part.scores
    for role, sums in whole.sums.items():
        total = {name: sum(part.sums[role][name] for part in parts) for name in sums}
        assert total == pytest.approx(sums, rel=1e-6, abs=1e-7)
    assert scores.keys() == whole.scores.keys()
    for number, values in whole.scores.items():
        np.testing.assert_allclose(scores[number], values, atol=1e-4)
    return parts, whole


@pytest.mark.parametrize("ranks", [SHARDED, REPLICATED], ids=["sharded", "replicated"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_compute_what_one_process_computes(pair, ranks, kind):
    equals_one_process(pair, ranks, KINDS[kind])


@pytest.mark.full
@pytest.mark.parametrize("ranks", OF_FOUR)
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_compute_what_one_process_computes(four, ranks, kind):
    equals_one_process(four, OF_FOUR[ranks], KINDS[kind])


@pytest.mark.parametrize("kind", ["packed", "folded", "critic", "experts"])
def test_a_rank_without_a_sample_computes_with_the_others(pair, kind):
    equals_one_process(pair, SHARDED, KINDS[kind], LONELY)


@pytest.mark.full
@pytest.mark.parametrize("ranks", OF_FOUR)
def test_three_ranks_without_a_sample_compute_with_the_fourth(four, ranks):
    equals_one_process(four, OF_FOUR[ranks], KINDS["folded"], LONELY)


@pytest.mark.parametrize("masks", [RAGGED, LONELY], ids=["ragged", "lonely"])
@pytest.mark.parametrize(("name", "error"), [("llama", 1e-8), ("qwen3", 1e-8), ("gemma2", 1e-5)])
def test_two_ranks_in_float64_compute_what_a_loop_over_tokens_gives(pair, name, error, masks):
    """Gemma's norms compute in float32."""
    kind, train_batch = Kind(name, torch.float64), with_returns(batch(1, masks))
    loss, expected = reference_gradient(kind.model(), train_batch, imitation=False)
    parts = pair.meet(updated, SHARDED, kind, train_batch)
    assert sum(part.sums["old"]["loss"] for part in parts) == pytest.approx(loss, rel=error)
    for part in parts:
        assert {weight for _, weight in part.gradients} == expected.keys()
        for (_, weight), gradient in part.gradients.items():
            assert (gradient - expected[weight]).norm() <= error * expected[weight].norm(), weight


@pytest.mark.parametrize("ranks", [SHARDED, REPLICATED], ids=["sharded", "replicated"])
def test_muon_orthogonalizes_whole_matrices(pair, ranks):
    kind = Kind("qwen3", changes={"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1})
    train_batch, before = batch(1, RAGGED), dict(kind.model().named_parameters())
    whole = updated(None, 0, ONE, kind, train_batch)
    for part in pair.meet(updated, ranks, kind, train_batch):
        for name, weight in whole.weights.items():
            assert not torch.equal(weight, before[name])
            torch.testing.assert_close(part.weights[name], weight, rtol=0, atol=1e-5, msg=name)


def test_a_long_gradient_is_cut_by_the_norm_of_all_ranks(pair):
    kind = KINDS["packed"]._replace(changes={"clip_grad": 0.1})
    parts, whole = equals_one_process(pair, SHARDED, kind)
    assert whole.steps["old"]["grad_norm"] > 1
    for part in parts:
        norm = torch.stack([gradient.norm() for gradient in part.gradients.values()]).norm()
        assert float(norm) == pytest.approx(0.1, rel=1e-4)


def test_bf16_changes_the_gradient_of_ranks_a_little_and_keeps_its_direction(pair):
    train_batch = with_returns(batch(1, RAGGED))
    half = pair.meet(updated, SHARDED, KINDS["packed"]._replace(changes={"bf16": True}), train_batch)
    whole = updated(None, 0, ONE, KINDS["packed"], train_batch)
    gradients = [torch.cat([g.flatten() for g in each.gradients.values()]) for each in (half[0], whole)]
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ranks_hold_what_the_formula_gives(pair, optimizer):
    config = settings(optimizer=optimizer)
    kind = Kind("qwen2", changes={"optimizer": optimizer})
    first, second = pair.meet(held, SHARDED, kind, batch(1, RAGGED))
    expected = torch_memory(Networks(kind.model().config), config, 16, shards=2)
    assert first == (expected.weights, expected.gradients, expected.optimizer)
    assert sum(second) <= sum(first)
    replicas = pair.meet(held, REPLICATED, kind, batch(1, RAGGED))
    of_one = torch_memory(Networks(kind.model().config), config, 16)
    assert replicas == 2 * [(of_one.weights, of_one.gradients, of_one.optimizer)]


def test_a_row_is_cut_where_it_is_told_to_be():
    samples = batch(1, RAGGED).samples
    masks = [sample.loss_mask for sample in samples]
    (row,) = micro_batches(samples, masks, 10_000)
    parts = micro_batches(samples, masks, 10_000, lambda lengths: [3, len(lengths) - 3])
    assert [len(part.members) for part in parts] == [3, len(row.members) - 3]
    for name in ("members", "lengths", "positions"):
        joined = [each for part in parts for each in getattr(part, name)]
        assert list(map(str, joined)) == list(map(str, getattr(row, name)))
    for name in ("input_ids_T", "position_ids_T", "targets_N", "temperature_N"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(joined, getattr(row, name))
