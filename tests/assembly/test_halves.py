"""Where a run leaves out playing or training, the settings of that half are refused by name."""

from __future__ import annotations

import re

import pytest

from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.config import parse, read_toml, write_toml
from agentrl.errors import ConfigError
from tests.assembly.test_every_setting import config_of, file_with

REPLAY, PLAYS_ONLY = {"replay": "runs/x"}, {"debug_rollout_only": True}
WITHOUT_EFFECT = [
    *(
        (name, value, REPLAY, "with replay, whose journal has the episodes; drop that")
        for name, value in {
            **{
                "engine": "sglang",
                "max_slots": 4,
                "rollout_batch_size": 8,
                "n_samples_per_prompt": 4,
                "rollout_temperature": 0.5,
            },
            **{"over_sampling_batch_size": 64, "group_reward": "x:y", "custom_generate_function_path": "x:y"},
            **{"dynamic_sampling_filter_path": "x:y", "max_episode_retries": 1, "shuffle_rewards": True},
            **{"eval_interval": 2, "metric_for_best_model": "eval/greedy", "opponents": {"a": "script"}},
            **{"rollout_max_prompt_len": 9, "tool_timeout_s": 1.0, "max_turns": 3},
            "custom_reward_post_process_path": "x:y",
            "rollout_function_path": "x:y",
            "custom_update_weight_post_write_path": "x:y",
        }.items()
    ),
    ("prompt_data", "x.jsonl", {**REPLAY, "hf_checkpoint": "x"}, "with replay"),
    ("tools", ["search"], {**REPLAY, "hf_checkpoint": "x"}, "with replay"),
    ("dialect", "chat", {**REPLAY, "hf_checkpoint": "x"}, "with replay"),
    ("apply_chat_template", True, {**REPLAY, "hf_checkpoint": "x"}, "with replay"),
    *(
        (
            name,
            value,
            PLAYS_ONLY,
            "with debug_rollout_only (`agentrl rollout`), which trains nothing; drop that",
        )
        for name, value in {
            **{"lr": 1e-3, "trainer": "megatron", "bf16": True, "num_steps_per_rollout": 1},
            **{
                "rollout_sample_filter_path": "x:y",
                "custom_reward_post_process_path": "x:y",
                "custom_convert_samples_to_train_data_path": "x:y",
                "custom_update_weight_post_write_path": "x:y",
                "eval_function_path": "x:y",
                "profile_step": 1,
                "correction": "tis",
                "use_tis": True,
                "eps_clip": 0.1,
                "warm_start_steps": 9,
                "eval_episodes": 4,
            },
        }.items()
    ),
]


@pytest.mark.parametrize(("name", "value", "under", "message"), WITHOUT_EFFECT)
def test_a_setting_of_the_half_that_a_run_leaves_out_is_refused_by_its_name(
    tmp_path, name, value, under, message
):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(file_with(tmp_path / "run.toml", under), {name: value})
    assert f": {name} has no effect " in str(caught.value)
    config = load_config(file_with(tmp_path / "run.toml", {**under, name: value}), {})
    assert any("No effect here" in line for line in listed_inactive(config))
    write_toml(config, tmp_path / "config.toml")
    assert parse(RunConfig, read_toml(tmp_path / "config.toml"), source="x") == config


@pytest.mark.parametrize(
    ("name", "value", "under"),
    [
        ("lr", 1e-3, REPLAY),
        ("num_steps_per_rollout", 2, REPLAY),
        ("rollout_max_context_len", 64, REPLAY),
        ("rollout_sample_filter_path", "x:y", REPLAY),
        ("over_sampling_batch_size", 64, PLAYS_ONLY),
        ("prompt_data", "x.jsonl", REPLAY),
        ("tools", ["search"], REPLAY),
        ("max_turns", 3, {**REPLAY, "warm_start_steps": 1}),
        ("rollout_temperature", 0.5, PLAYS_ONLY),
        ("num_steps_per_rollout", 2, {**PLAYS_ONLY, "global_batch_size": 64}),
    ],
)
def test_a_setting_of_the_other_half_acts(name, value, under):
    assert name not in config_of({**under, name: value}).inactive


def test_a_run_either_replays_or_only_plays():
    with pytest.raises(ConfigError, match="replay trains without playing, and debug_rollout_only plays"):
        config_of({**REPLAY, **PLAYS_ONLY})
    assert config_of({"load_debug_rollout_data": "runs/x"}) == config_of(REPLAY)
    for alone in (REPLAY, PLAYS_ONLY):
        assert config_of({**alone, "num_rollout": 3}).warnings == ()
