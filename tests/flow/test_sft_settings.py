"""Every setting of SFT changes what a run does; any other is refused, or listed where a file holds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl
from agentrl.assembly.config import SFT_SETTINGS, RunConfig, SftConfig
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.config import effective_values, leaves, parse, read_toml, write_toml
from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes.config import ClusterConfig
from agentrl.trainer.megatron.config import MegatronConfig
from tests.assembly.test_every_setting import INACTIVE, file_with
from tests.data.files import write_lines
from tests.flow.runs import metrics_of
from tests.flow.sft import conversation, conversations, sft
from tests.flow.test_settings_act import Change, without_times

FALLS = {"lr_decay_style": "linear"}
CHANGES = {
    "name": Change("other"),
    "output_dir": Change("elsewhere"),
    "seed": Change(1),
    "num_threads": Change(2),
    "use_tensorboard": Change(True),
    "env": Change("tests.flow.worlds:Coder"),
    "env_kwargs": Change({"map_name": "8x8"}),
    "tools": Change(["calculator"]),
    "tool_kwargs": Change({"search": {"topk": 1}}, {"tools": ["search"]}),
    "hf_checkpoint": Change("nowhere"),
    "num_layers": Change(2),
    "hidden_size": Change(32),
    "ffn_hidden_size": Change(32),
    "num_attention_heads": Change(4),
    "num_query_groups": Change(2),
    "kv_channels": Change(16),
    "rotary_base": Change(500.0),
    "vocab_size": Change(268),
    "sft_data": Change("other.jsonl"),
    "messages_key": Change("chat"),
    "tools_key": Change("functions"),
    "min_reward": Change(0.5),
    "num_epoch": Change(2),
    "sft_batch_size": Change(6),
    "sft_lr": Change(1e-3),
    "eval_sft_data": Change("other.jsonl"),
    "dialect": Change("chat"),
    "chat_format": Change("qwen3", {"dialect": "chat"}),
    # An argument that is refused.
    "apply_chat_template_kwargs": Change({"messages": []}),
    "rollout_max_context_len": Change(12),
    "trainer": Change("megatron"),
    # A choice that is refused without a GPU.
    "device": Change("cuda"),
    "optimizer": Change("muon"),
    "lr": Change(1e-3),
    "min_lr": Change(1e-3, FALLS),
    "lr_warmup_iters": Change(2),
    "lr_decay_style": Change("linear"),
    "lr_decay_iters": Change(2, FALLS),
    "weight_decay": Change(0.5),
    "adam_beta1": Change(0.5),
    "adam_beta2": Change(0.5),
    "adam_eps": Change(1e-2),
    "clip_grad": Change(1e-3),
    "max_tokens_per_gpu": Change(30),
    "bf16": Change(True),
    # Refused for a dense model.
    "moe_aux_loss_coeff": Change(0.1),
    "moe_z_loss_coeff": Change(0.1),
    # Refused without Megatron.
    "enable_mtp_training": Change(True),
    "only_train_params_name_list": Change(["mlp"]),
    "freeze_params_name_list": Change(["embed_tokens"]),
    "lora_rank": Change(2),
    "lora_alpha": Change(4, {"lora_rank": 2}),
    "lora_target_modules": Change("q_proj", {"lora_rank": 2}),
    "eval_interval": Change(1, {"eval_sft_data": "other.jsonl"}),
    "save_interval": Change(1),
    "save_total_limit": Change(1, {"save_interval": 1}),
    "log_model_config": Change(True),
}
ELSEWHERE = {
    "inline",
    # Change no bit: `tests/trainer/test_recompute.py`, `tests/trainer/test_cpu_adamw.py`.
    *("gradient_checkpointing", "optimizer_cpu_offload"),
    # Of layers that Megatron alone trains: `tests/trainer/megatron/test_ahead_trainer.py`.
    "mtp_loss_scaling_factor",
    "use_wandb",
    "wandb_project",
    "wandb_group",
    "wandb_mode",
    "use_prometheus",
    "prometheus_host",
    "prometheus_port",
    "max_restarts",
    *("fsdp_size", *MegatronConfig.model_fields),
    *(ClusterConfig.model_fields.keys() - {"num_cpus_per_server", "num_cpus_per_rollout_worker"}),
}
"""Shown by tests of processes, of trackers, of restarts, of ranks and of Ray."""


def test_every_setting_of_sft_is_here():
    assert {*CHANGES, *ELSEWHERE} == SFT_SETTINGS


def observed(monkeypatch, folder, settings):
    """What a run does, or the sentence that it ends with."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    rows = [{**conversation("left", n), "functions": []} for n in range(12)]
    write_lines(folder / "c.jsonl", rows)
    conversations(folder / "other.jsonl", number=12)
    try:
        run = sft(
            "runs",
            **{
                "sft_data": "c.jsonl",
                "use_tensorboard": False,
                "eval_interval": 2,
                "sft_batch_size": 4,
                **settings,
            },
        )
    except AgentRLError as error:
        return str(error)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name)
    config = (run.folder / "config.toml").read_text() if "num_threads" in settings else ""
    (weights,) = [path.read_bytes() for path in (run.folder / "checkpoint").glob("*.safetensors")]
    return files, without_times(metrics_of(run.folder)), weights, run.taken, config


@pytest.mark.full
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_what_a_run_does(monkeypatch, tmp_path, name):
    value, under = CHANGES[name]
    without = observed(monkeypatch, tmp_path / "without", under)
    assert observed(monkeypatch, tmp_path / "with", {**under, name: value}) != without


@pytest.mark.parametrize("name", sorted(INACTIVE.keys() - SFT_SETTINGS))
def test_a_setting_of_rl_is_refused_and_listed_where_a_file_holds_it(tmp_path, name):
    value, under = INACTIVE[name]
    file = file_with(tmp_path / "run.toml", {**under, "sft_data": "c.jsonl"})
    with pytest.raises(ConfigError, match=f"{name} has no effect with agentrl sft; use agentrl train"):
        load_config(file, {name: value}, SftConfig)
    config = load_config(file_with(file, {**under, name: value, "sft_data": "c.jsonl"}), {}, SftConfig)
    assert any(name in line for line in listed_inactive(config))
    # What the folder of a run holds serves the other command, too.
    write_toml(config, tmp_path / "config.toml")
    for kind in (SftConfig, RunConfig):
        again = parse(kind, read_toml(tmp_path / "config.toml"), source="x")
        assert name in effective_values(again)[leaves(RunConfig)[name][0]]
    assert parse(SftConfig, read_toml(tmp_path / "config.toml"), source="x") == config


def test_the_example_is_read_by_both_commands():
    file = "examples/sft_then_rl/run.toml"
    sft_config, config = load_config(file, {}, SftConfig), load_config(file, {})
    assert (sft_config.run_name, config.run_name) == ("calculator-sft", "calculator")
    assert not any("sft_data" in line for line in listed_inactive(sft_config))
    assert any("sft_data" in line for line in listed_inactive(config))
    assert any("num_rollout" in line for line in listed_inactive(sft_config))


@pytest.mark.learning
def test_rl_reaches_more_than_sft_alone(monkeypatch, tmp_path):
    """The example, in full."""
    shutil.copytree(Path(__file__).parents[2] / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "examples/sft_then_rl/demonstrate.py", "8000"], check=True)
    supervised = agentrl.sft("examples/sft_then_rl/run.toml", quiet=True)
    assert min(supervised.losses.values()) < 0.2 * supervised.losses[0]
    result = agentrl.train(
        "examples/sft_then_rl/run.toml", quiet=True, hf_checkpoint=str(supervised.folder / "checkpoint")
    )
    before, after = (result.reports[at]["sampled"].mean for at in ("before", "after RL"))
    assert before > 0.25
    assert after > before + 0.2
