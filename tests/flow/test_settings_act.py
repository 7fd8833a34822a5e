"""Every setting outside the algorithm changes what a run does, shown by two runs that differ in it alone.

`tests/assembly/test_every_setting.py` does the same to the algorithm's settings, and to those that can be
without effect.
"""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.rollout import producer_settings, staleness_policy
from agentrl.config import leaves
from agentrl.errors import AgentRLError
from agentrl.rollout.config import RolloutConfig
from tests.assembly.algorithm_settings import ALGORITHM
from tests.assembly.test_every_setting import INACTIVE, REFUSED_ANYWAY
from tests.flow.runs import SHAPE, journal_of, metrics_of
from tests.flow.worlds import Shaky

SMALL = {
    **SHAPE,
    "env": "tests.flow.worlds:Talkative",
    "inline": True,
    "num_rollout": 2,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "lr_warmup_iters": 1,
    "use_tensorboard": False,
}
RPS = {"env": "RockPaperScissors-v0"}
PROMPTS = str(Path(__file__).with_name("prompts.jsonl"))
FILE = {"prompt_data": PROMPTS}
LATE = {"max_staleness": 1}
SINGLE = {"env": "SingleTurn-v0", "rollout_max_context_len": 96, **FILE}


BUFFER = {"data_buffer_groups": 1, "data_buffer_size": 4, "correction": "tis", "num_rollout": 3}


class Change(NamedTuple):
    """Another value of a setting, and what has to be set for it to act."""

    value: object
    under: Mapping[str, object] = MappingProxyType({})


CHANGES = {
    "name": Change("other"),
    "output_dir": Change("elsewhere"),
    "seed": Change(1),
    "num_threads": Change(2),
    "use_tensorboard": Change(True),
    "use_wandb": Change(True),
    "wandb_project": Change("other", {"use_wandb": True}),
    "wandb_group": Change("seeds", {"use_wandb": True}),
    "wandb_mode": Change("offline", {"use_wandb": True}),
    "log_model_config": Change(True),
    "profile_step": Change(1),
    "memory_snapshot_step": Change(1),
    "reset_timeout_s": Change(17.0),
    "tool_timeout_s": Change(17.0),
    "step_timeout_s": Change(17.0),
    "reward_timeout_s": Change(17.0),
    "episode_timeout_s": Change(17.0),
    "max_tool_chars": Change(3),
    "max_calls_per_turn": Change(3),
    "opponents": Change({"player_1": "script"}, RPS),
    "tools": Change(["calculator"]),
    "tool_kwargs": Change({"search": {"topk": 1}}, {"tools": ["search"]}),
    "env": Change("tests.flow.worlds:Judged"),
    "env_kwargs": Change({"map_name": "8x8"}, {"env": "FrozenLake-v0"}),
    "train_split": Change("other"),
    "reward": Change("tests.flow.worlds:shortness", SINGLE),
    "env_reward_weight": Change(0.5, {"reward": "tests.flow.worlds:shortness", "env_reward_weight": 0.0}),
    "reward_kwargs": Change({"timeout_s": 0}, {**SINGLE, "reward": "math"}),
    "prompt_data": Change(PROMPTS),
    "input_key": Change("question", FILE),
    "label_key": Change("answer", FILE),
    "metadata_key": Change("facts", FILE),
    "tool_key": Change("tools", FILE),
    "rollout_max_prompt_len": Change(30, FILE),
    "rollout_shuffle": Change(False, FILE),
    "data_source_path": Change("tests.flow.worlds:Numbers"),
    "hf_checkpoint": Change("nowhere"),
    "warm_start_steps": Change(1),
    "dialect": Change("chat"),
    # An argument that is refused.
    "apply_chat_template_kwargs": Change({"messages": []}),
    "rollout_stop": Change(["a"]),
    "rollout_stop_token_ids": Change([5]),
    "num_rollout": Change(1),
    "rollout_batch_size": Change(3),
    "n_samples_per_prompt": Change(3),
    "num_steps_per_rollout": Change(2),
    "global_batch_size": Change(4),
    "rollout_temperature": Change(0.7),
    "rollout_top_p": Change(0.9),
    "rollout_top_k": Change(5),
    "replay_sampling_mask": Change(False, {"rollout_top_p": 0.9}),
    # Refused for a dense model: tests/flow/test_routing.py shows runs of a mixture of experts.
    "return_routed_experts": Change(True),
    "router_replay": Change("R3"),
    "moe_aux_loss_coeff": Change(0.1),
    "moe_z_loss_coeff": Change(0.1),
    # Refused without Megatron.
    "enable_mtp_training": Change(True),
    "rollout_max_response_len": Change(4),
    "rollout_max_context_len": Change(32),
    "max_turns": Change(1),
    "shuffle_rewards": Change(True),
    "dynamic_sampling_filter_path": Change("tests.flow.worlds:drop_even_seeds"),
    "max_num_gen_batches": Change(
        1,
        {
            "dynamic_sampling_filter_path": "tests.flow.worlds:drop_even_seeds",
            "num_rollout": 6,
        },
    ),
    "over_sampling_batch_size": Change(3),
    # A choice that is refused: tests/flow/test_filter.py shows one that acts.
    "buffer_filter_path": Change("tests.flow.worlds:drop_all", {"over_sampling_batch_size": 2}),
    "custom_reward_post_process_path": Change("tests.flow.worlds:mirrored"),
    "custom_convert_samples_to_train_data_path": Change("tests.flow.own_functions:every_second_token"),
    "custom_rollout_log_function_path": Change("tests.flow.own_functions:number_of_turns"),
    "rollout_function_path": Change("tests.flow.own_functions:more_than_it_takes"),
    "eval_function_path": Change("tests.flow.own_functions:half_of_them"),
    "rollout_sample_hook_path": Change("tests.flow.own_functions:seen"),
    "rollout_sample_filter_path": Change("tests.flow.worlds:every_second"),
    "custom_generate_function_path": Change("tests.flow.worlds:hinted"),
    "generate_function_paths": Change(["tests.flow.worlds:hinted"], {"env": "tests.flow.worlds:Asking"}),
    "group_reward": Change("tests.flow.worlds:place"),
    "group_reward_kwargs": Change({"weight": 0.5}, {"group_reward": "diversity"}),
    # The episodes are the same; the players have logs.
    "num_rollout_workers": Change(
        1, {"inline": False, "enable_deterministic_inference": True, "num_rollout": 1}
    ),
    "max_staleness": Change(1, {"correction": "tis"}),
    "update_weights_interval": Change(2, {"correction": "tis"}),
    "data_buffer_groups": Change(2, {**BUFFER, "data_buffer_size": 2}),
    "data_buffer_size": Change(1, BUFFER),
    # A choice that is refused: tests/flow/test_data_buffer.py shows one that acts.
    "data_buffer_filter_path": Change("tests.flow.worlds:drop_all", BUFFER),
    "replay": Change("nowhere"),
    "debug_rollout_only": Change(True),
    "max_idle_rollouts": Change(1, {"env": "tests.flow.worlds:Bandit"}),
    "max_episode_retries": Change(0, {"env": "tests.flow.worlds:Shaky", "num_rollout": 6}),
    "group_timeout_s": Change(1e-9),
    "trainer": Change("megatron"),
    # A choice that is refused without Ray.
    "actor_num_nodes": Change(2),
    # The rank that is added has a log.
    "actor_num_gpus_per_node": Change(2, {"num_rollout": 1}),
    # A choice that is refused without a GPU.
    "device": Change("cuda"),
    "optimizer": Change("muon"),
    # A choice that is refused on the CPU; tests/trainer/test_cpu_adamw.py shows what it does.
    "reset_optimizer_states": Change(True),
    "lr": Change(1e-2),
    "lr_warmup_iters": Change(2),
    "lr_decay_style": Change("linear", {"num_rollout": 4}),
    "weight_decay": Change(0.5),
    "adam_beta1": Change(0.5),
    "adam_beta2": Change(0.5),
    "adam_eps": Change(1e-2),
    "clip_grad": Change(1e-3),
    "max_tokens_per_gpu": Change(64),
    "bf16": Change(True),
    "only_train_params_name_list": Change(["mlp"]),
    "freeze_params_name_list": Change(["embed_tokens"]),
    "lora_rank": Change(2),
    "lora_alpha": Change(4, {"lora_rank": 2}),
    "lora_target_modules": Change("q_proj", {"lora_rank": 2}),
    "colocate": Change(True),
    "offload_rollout": Change(True),
    "offload_train": Change(True),
    "cluster": Change("ray", {"inline": False, "enable_deterministic_inference": True, "num_rollout": 1}),
    "engine": Change("sglang", {"sglang_url": "http://127.0.0.1:1"}),
    "max_slots": Change(1),
    "enable_deterministic_inference": Change(True),
    "engine_dtype": Change("bfloat16"),
    "max_context_len": Change(20),
    "sglang_models": Change({"judge": {"hf_checkpoint": "nowhere"}}),
    "eval_interval": Change(1),
    "eval_prompt_data": Change(PROMPTS),
    "eval_split": Change("other"),
    "eval_episodes": Change(3),
    "eval_temperature": Change(0.1),
    "n_samples_per_eval_prompt": Change(2),
    # An evaluation that is awaited is the same on both engines; the second one has a log.
    "async_eval": Change(True),
    "eval_engine": Change(
        "own",
        {"async_eval": True, "inline": False, "enable_deterministic_inference": True, "num_rollout": 1},
    ),
    "eval_top_p": Change(0.3),
    "eval_top_k": Change(2),
    "skip_eval_before_train": Change(True),
    "eval_max_response_len": Change(2),
    "save_interval": Change(1),
    "save_total_limit": Change(1, {"save_interval": 1, "num_rollout": 4}),
    "metric_for_best_model": Change(
        "none", {"save_interval": 1, "eval_interval": 1, "num_rollout": 4, "save_total_limit": 1}
    ),
}


# Act on a run that hangs or fails: `tests/run/test_monitor.py`, `tests/flow/test_restarts.py`.
FAULTS = {"hang_warning_s", "max_restarts"}
# What others read while a run goes on: `tests/records/test_prometheus.py`, `tests/flow/test_callbacks.py`,
# `tests/run/test_whole_step.py`.
SERVED = {"use_prometheus", "callback", "custom_update_weight_post_write_path"}
# Saves memory, and changes no bit: `tests/trainer/test_recompute.py`.
SAVES = {"gradient_checkpointing"}
# Of layers that Megatron alone trains: `tests/trainer/megatron/test_ahead_trainer.py`.
AHEAD = {"mtp_loss_scaling_factor"}
# What these do depends on which group ends first, so no two runs are equal: `tests/rollout/test_producer.py`
# shows it.
OF_TIMING = {
    "staleness_policy": Change("ready_first", LATE),
    "staleness_window": Change(1, LATE),
    "async_buffer_size": Change(1, LATE),
    "partial_rollout": Change(False, LATE),
}


def test_every_setting_is_here_or_where_the_algorithms_are():
    assert {
        *CHANGES,
        *OF_TIMING,
        *FAULTS,
        *SERVED,
        *SAVES,
        *AHEAD,
        *ALGORITHM,
        *INACTIVE,
        *REFUSED_ANYWAY,
    } == set(leaves(RunConfig))


@pytest.mark.parametrize("name", OF_TIMING)
def test_a_setting_changes_when_groups_start_or_are_taken(name):
    value, under = OF_TIMING[name]
    without, plain, other = (
        RolloutConfig.model_validate(settings) for settings in ({}, under, {**under, name: value})
    )
    assert name in without.without_effect
    assert name not in other.without_effect

    def parts(config):
        policy, settings = staleness_policy(config), producer_settings(config, num_batches=1)
        return policy, type(policy), settings, config.spans_updates

    assert parts(other) != parts(plain)


class StandInWandb(ModuleType):
    """Writes its arguments as the name of a file in the run's folder."""

    Settings = SimpleNamespace

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)

    def init(self, *, project, group, mode, dir, **others):
        Path(dir, f"wandb-{project}-{group}-{mode}").touch()
        return MagicMock()


def weights_of(folder: Path) -> int:
    files = sorted((folder / "checkpoint").glob("*.safetensors"))
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def without_times(value):
    """JSON without what the clock put there."""
    if isinstance(value, dict):
        timed = {"seconds", "queue_seconds", "took", "time_s"}
        return {
            # What is measured is another time and again.
            key: 0 if key.startswith("perf/") else without_times(inner)
            for key, inner in value.items()
            if key not in timed and not any(part in key for part in ("latency", "_ms", "/took/"))
        }
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def observed(monkeypatch, folder: Path, settings: Mapping[str, object]) -> object:
    """What a run does, or the sentence that it ends with."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    Shaky.chance.seed(0)
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "wandb", StandInWandb())
    shape = SHAPE if "hf_checkpoint" in settings else ()
    options = {name: value for name, value in {**SMALL, **settings}.items() if name not in shape}
    try:
        run = agentrl.train(quiet=True, **options)
    except AgentRLError as error:
        return str(error)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name)
    metrics, journal = without_times(metrics_of(run.folder)), without_times(journal_of(run.folder))
    return files, metrics, journal, weights_of(run.folder), torch.get_num_threads()


@pytest.mark.full
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_what_a_run_does(monkeypatch, tmp_path, name):
    value, under = CHANGES[name]
    before = observed(monkeypatch, tmp_path / "run", under)
    assert observed(monkeypatch, tmp_path / "run", under) == before
    assert observed(monkeypatch, tmp_path / "run", {**under, name: value}) != before
