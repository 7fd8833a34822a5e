"""Routing replay in every layout: the gradient of transformers with routers that are made to choose."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.trainer.routing import put_together, routing_metrics
from agentrl.types import ROUTED_EXPERTS
from tests.engine.routes import routers_in, routes_of
from tests.trainer.megatron.equality import routed_samples, samples
from tests.trainer.megatron.layouts import sizes_of
from tests.trainer.megatron.models import MIXTURES, model_of
from tests.trainer.megatron.test_equality import (
    CASES,
    CP,
    EP,
    EXPERTS,
    FULL,
    PP,
    SP,
    TP,
    check,
)
from tests.trainer.routes import router_losses
from tests.trainer.test_routing import expected_metrics

LAYOUTS = {
    **{name: sizes for name, sizes in EXPERTS.items() if "x" not in name},
    "DP2": {},
    "CP2": CP,
    "PP2": PP,
    "PP2, virtual": {**PP, "num_virtual_stages_per_pipeline_rank": 2},
    "PP2, recomputed": {**PP, **FULL},
}


def expect_routed(kind, parts, *, replays):
    """What every token went through, put together from all ranks, and the sums of the routers."""
    whole, model = put_together([part.routed for part in parts], samples()), model_of(kind)
    for sample, rows in zip(routed_samples(kind), whole, strict=True):
        # A row ends before the last token that it predicts.
        end = int(np.flatnonzero(sample.loss_mask)[-1])
        assert (rows[end:] == -1).all()
        taken, given = np.sort(rows[:end], -1), np.sort(sample.extras[ROUTED_EXPERTS].values[:end], -1)
        if not replays:
            np.testing.assert_array_equal(taken, routes_of(model, sample.token_ids[:end].tolist()))
            continue
        known = (given >= 0).all((1, 2))
        np.testing.assert_array_equal(taken[known], given[known])
        assert (taken >= 0).all()
    return metrics_of(parts)


def metrics_of(parts):
    num_sequences = sum(bool(sample.loss_mask.any()) for sample in samples())
    return routing_metrics([part.routing for part in parts], num_sequences)


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_one_rank_replays_what_the_samples_say(single, kind):
    expect_routed(kind, check(single, kind, engines="replayed"), replays=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_replay_what_the_samples_say(pair, name):
    parts = check(pair, "qwen3_moe", engines="replayed", **LAYOUTS[name])
    expect_routed("qwen3_moe", parts, replays=True)


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_every_family_replays_over_ranks(pair, kind):
    sizes = {**TP, **SP, **EP, "expert_tensor_parallel_size": 1}
    parts = check(pair, kind, engines="replayed", **sizes)
    expect_routed(kind, parts, replays=True)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] in MIXTURES])
def test_four_ranks_replay_under_every_two_of_options_and_families(four, name):
    kind, sizes = CASES[name]["kind"], sizes_of(CASES[name])
    parts = check(four, kind, engines="replayed", **sizes)
    expect_routed(CASES[name]["kind"], parts, replays=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_the_ranks_took_is_what_each_prefix_takes_alone(pair, name):
    """And a step says how all of them routed its tokens, and how many to other experts than the engine."""
    kind = "qwen3_moe"
    parts = check(pair, kind, engines="compared", **LAYOUTS[name])
    metrics = expect_routed(kind, parts, replays=False)
    expected = expected_metrics(model_of(kind), routed_samples(kind))
    assert {f"train/{key}" for key in metrics} == expected.keys()
    for key, value in metrics.items():
        assert value == pytest.approx(expected[f"train/{key}"], rel=1e-5), key


def expect_losses(kind, parts):
    metrics, model = metrics_of(parts), model_of(kind)
    balance, squares = (loss.item() / len(routers_in(model)) for loss in router_losses(model, samples()))
    assert metrics["moe_aux_loss"] == pytest.approx(balance, rel=1e-4)
    assert metrics["moe_z_loss"] == pytest.approx(squares, rel=1e-4)


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_one_rank_has_the_gradient_of_the_losses_of_routers(single, kind):
    expect_losses(kind, check(single, kind, engines="balanced"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_have_the_gradient_of_the_losses_of_routers(pair, name):
    expect_losses("qwen3_moe", check(pair, "qwen3_moe", engines="balanced", **LAYOUTS[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] in MIXTURES])
def test_four_ranks_have_the_gradient_of_the_losses_of_routers(four, name):
    kind, sizes = CASES[name]["kind"], sizes_of(CASES[name])
    parts = check(four, kind, engines="balanced", **sizes)
    expect_losses(kind, parts)
