"""The batch identity holds, or one sentence says which of the four numbers to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.assembly.config import RunConfig
from agentrl.assembly.sections import ModelSection
from agentrl.engine.config import EngineConfig
from agentrl.rollout.config import RolloutConfig

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES, SIZES)
def test_four_numbers_are_accepted_exactly_when_they_agree(prompts, siblings, steps, batch):
    try:
        config = RolloutConfig(
            rollout_batch_size=prompts,
            n_samples_per_prompt=siblings,
            num_steps_per_rollout=steps,
            global_batch_size=batch,
        )
    except ValidationError:
        assert prompts * siblings != batch * steps
    else:
        assert prompts * siblings == batch * steps
        assert (config.prompts, config.episodes_per_step) == (prompts, batch)


@given(SIZES, SIZES, SIZES)
def test_a_missing_batch_size_is_derived_or_refused(prompts, siblings, steps):
    try:
        config = RolloutConfig(
            rollout_batch_size=prompts, n_samples_per_prompt=siblings, num_steps_per_rollout=steps
        )
    except ValidationError:
        assert prompts * siblings % steps
    else:
        assert config.episodes_per_step * steps == prompts * siblings


@given(SIZES, SIZES, SIZES)
def test_a_missing_number_of_prompts_is_derived_or_refused(batch, siblings, steps):
    try:
        config = RolloutConfig(
            global_batch_size=batch, n_samples_per_prompt=siblings, num_steps_per_rollout=steps
        )
    except ValidationError:
        assert batch * steps % siblings
    else:
        assert config.prompts * siblings == batch * steps


def test_without_both_there_are_32_prompts():
    assert RolloutConfig(n_samples_per_prompt=8).prompts == 32


@pytest.mark.parametrize(("prompts", "limit"), [(1, 640), (8, 80), (32, 20), (33, 20), (512, 20)])
def test_a_run_without_signal_ends_after_640_groups_and_at_least_20_iterations(prompts, limit):
    assert RolloutConfig(rollout_batch_size=prompts).idle_limit == limit
    assert RolloutConfig(rollout_batch_size=prompts, max_idle_rollouts=7).idle_limit == 7
    assert RolloutConfig(rollout_batch_size=prompts, max_idle_rollouts=0).idle_limit == 0


def test_the_error_contains_all_numbers_and_the_remedy():
    with pytest.raises(ValidationError) as caught:
        RolloutConfig(rollout_batch_size=32, n_samples_per_prompt=8, global_batch_size=100)
    message = caught.value.errors()[0]["msg"]
    assert "rollout_batch_size (32) x n_samples_per_prompt (8) = 256" in message
    assert "global_batch_size (100) x num_steps_per_rollout (1) = 100" in message
    assert "change one of the four" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout_temperature", 0.0),
        ("rollout_temperature", float("nan")),
        ("rollout_top_p", 0.0),
        ("rollout_top_p", 1.1),
        ("rollout_top_k", -1),
        ("n_samples_per_prompt", 0),
        ("num_rollout", -1),
        ("max_turns", 0),
    ],
)
def test_numbers_out_of_range_are_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        RolloutConfig(**{key: value})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"over_sampling_batch_size": 31},
            r"over_sampling_batch_size \(31\) must be at least rollout_batch_size \(32\)",
        ),
        (
            {"buffer_filter_path": "a:b"},
            "buffer_filter_path has no effect without over_sampling_batch_size; add it",
        ),
        (
            {"max_num_gen_batches": 3},
            "max_num_gen_batches has no effect without dynamic_sampling_filter_path",
        ),
        ({"rollout_sample_filter_path": "truncated"}, "rollout_sample_filter_path"),
    ],
)
def test_a_filter_without_effect_is_refused_by_its_name(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        RolloutConfig(**settings)


def test_only_taking_the_first_is_a_warning():
    first = {"over_sampling_batch_size": 64}
    chosen = {**first, "buffer_filter_path": "agentrl.algorithms.filters:highest_std"}
    model = ModelSection(hf_checkpoint="m")
    (warning,) = RunConfig(model=model, rollout=RolloutConfig(**first)).warnings
    assert "a run that resumes is not bit-equal" in warning
    assert RunConfig(model=model, rollout=RolloutConfig(**chosen)).warnings == ()


def test_the_warning_names_the_remedy_that_would_act():
    (synchronous,) = RolloutConfig(over_sampling_batch_size=64).warnings
    (asynchronous,) = RolloutConfig(over_sampling_batch_size=64, max_staleness=1).warnings
    assert "buffer_filter_path" in synchronous
    assert "buffer_filter_path" not in asynchronous
    assert RolloutConfig(over_sampling_batch_size=64, replay="runs/other").warnings == ()


CUT = {"rollout_top_p": 0.9}
ON_SGLANG = {"engine": "sglang"}
AT_ADDRESS = {**ON_SGLANG, "sglang_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("rollout", "engine", "replays", "warns"),
    [
        ({}, {}, False, False),
        (CUT, {}, True, False),
        ({"rollout_top_k": 1000}, {}, True, False),
        ({**CUT, "replay_sampling_mask": False}, {}, False, True),
        (CUT, ON_SGLANG, False, True),
        ({**CUT, "rollout_top_k": 128}, ON_SGLANG, True, False),
        ({"rollout_top_k": 129}, ON_SGLANG, False, True),
        (CUT, AT_ADDRESS, False, True),
        ({**CUT, "replay_sampling_mask": True}, AT_ADDRESS, True, False),
        ({**CUT, "debug_rollout_only": True}, {}, True, False),
        ({**CUT, "debug_rollout_only": True, "replay_sampling_mask": False}, {}, False, False),
        ({"replay": "runs/other"}, {}, False, False),
    ],
)
def test_a_cut_is_replayed_wherever_the_engine_can_report_it_and_else_warned_of(
    rollout, engine, replays, warns
):
    model = ModelSection(hf_checkpoint="m")
    config = RunConfig(model=model, rollout=RolloutConfig(**rollout), engine=EngineConfig(**engine))
    assert config.replays_sampling_mask is replays
    assert any("cut the distribution" in warning for warning in config.warnings) is warns
    for warning in config.warnings:
        bounded = engine and not 0 < rollout.get("rollout_top_k", 0) <= 128
        assert ("with rollout_top_k of 1 to 128" in warning) is bool(bounded)


@pytest.mark.parametrize("top_k", [0, 129])
def test_kept_ids_that_servers_cannot_report_are_refused(top_k):
    rollout = RolloutConfig(**CUT, rollout_top_k=top_k, replay_sampling_mask=True)
    with pytest.raises(ValidationError, match="set rollout_top_k to 1 to 128"):
        RunConfig(rollout=rollout, engine=EngineConfig(engine="sglang"))
