"""Every setting changes something, and where it would not, it is refused by its name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import tomli_w
import torch

import agentrl
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.estimator_choice import ESTIMATORS
from agentrl.assembly.algorithm import build_algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.assembly.trainer import TrainerFactory, check_auxiliary_models
from agentrl.config import by_section, effective_values, leaves, parse, read_toml, spellings, write_toml
from agentrl.errors import ConfigError, UserError
from agentrl.losses import PolicyLoss
from agentrl.rollout.cadence import moving_reference
from agentrl.run.pretraining import CriticData
from agentrl.run.replay import Replay
from agentrl.trainer.config import RanksConfig
from agentrl.weights.hf.source import ModelSource, open_source
from tests.algorithms.batches import EpisodeSpec, batch
from tests.assembly.algorithm_settings import ALGORITHM, OF_STALENESS, SPELLED
from tests.trainer.tiny import qwen3, tokenizer

GROUPS = batch(
    [EpisodeSpec((2,), 1.0), EpisodeSpec((1,), 0.0)], [EpisodeSpec((2,), 1.0), EpisodeSpec((1,), 1.0)]
).groups


CUSTOM = """
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.losses import PolicyLoss
estimator, loss = GroupRelative(), PolicyLoss(eps_clip=0.9)
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_parts", None)


def config_of(settings) -> RunConfig:
    return load_config(None, settings)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelSource:
    folder = tmp_path_factory.mktemp("policy")
    qwen3(torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return open_source(folder)


@pytest.fixture(autouse=True)
def journals(monkeypatch):
    """Every folder holds a journal."""
    monkeypatch.setattr(Replay, "opened", lambda folder, *, vocab_size: f"{folder}, {vocab_size}")


def observed(config: RunConfig, source: ModelSource, folder) -> object:
    """All that is built of the section, or the sentence that says what cannot be."""
    algorithm = build_algorithm(config.algorithm, max_length=10)
    try:
        check_auxiliary_models(source, config)
    except UserError as error:
        return repr(algorithm.estimator), repr(algorithm.loss), algorithm.roles, str(error)
    plan = TrainerFactory(config, folder).plan(source, PolicyLoss())
    idle = tuple(map(algorithm.is_idle, GROUPS))
    return (
        *(repr(algorithm.estimator), repr(algorithm.weights), repr(algorithm.loss), algorithm.roles, idle),
        plan.critic and (plan.critic_warmup, repr(plan.critic.loss), plan.critic.config),
        (plan.models, plan.policy.total_steps, plan.moves_reference),
        (repr(algorithm.controls), algorithm.statistics, algorithm.bootstraps, repr(algorithm.teacher)),
        (moving_reference(config.algorithm), repr(CriticData.of(config, source))),
    )


def test_every_setting_of_the_algorithm_is_here():
    section = {name for name, (home, _) in leaves(RunConfig).items() if home == "algorithm"}
    assert {*ALGORITHM, *OF_STALENESS} == section
    assert set(SPELLED) == {name for name, (home, _) in spellings(RunConfig).items() if home == "algorithm"}


@pytest.mark.parametrize("name", ALGORITHM)
def test_a_setting_changes_what_is_built(source, tmp_path, name):
    setting = ALGORITHM[name]
    together = ("use_opd", "opd_teacher_load", "opd_teacher_url")
    without = {k: v for k, v in setting.under.items() if k not in together}
    baseline = config_of(without if name in together else setting.under)
    changed = config_of({**setting.under, name: setting.value})
    assert observed(changed, source, tmp_path) != observed(baseline, source, tmp_path)


@pytest.mark.parametrize("name", [name for name, setting in ALGORITHM.items() if setting.refused])
def test_a_setting_without_effect_is_refused_by_its_name(name):
    setting = ALGORITHM[name]
    under, message = setting.refused
    config_of({key: value for key, value in under.items() if key != name})
    with pytest.raises(ConfigError) as caught:
        config_of({name: setting.value, **under})
    sentence = str(caught.value)
    assert name in sentence
    assert message in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", SPELLED)
def test_another_tools_word_is_the_setting_that_it_stands_for(name):
    value, settings = SPELLED[name]
    under = {"tis_threshold": {"correction": "tis"}, "i_accept_bias": {"max_staleness": 1}}.get(name, {})
    assert config_of({**under, name: value}) == config_of({**under, **settings})


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ('correction = "mis"', {"use_tis": True, "tis_clip": "3"}, {"correction": "tis", "tis_clip": 3.0}),
        ("use_tis = true", {"correction": "mis"}, {"correction": "mis"}),
        ("use_tis = true", {"use_tis": False}, {}),
        ('correction = "mis"', {"use_tis": False}, {"correction": "mis"}),
        ("use_tis = true\n[algorithm.tis]\nclip = 3", {"tis_clip": 4}, {"use_tis": True, "tis_clip": 4.0}),
        (
            "use_tis = true\n[algorithm.tis]\nclip = 3",
            {"tis_clip_low": 1},
            {"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 1.0},
        ),
        ("use_tis = true\ntis_clip = 3", {"tis_threshold": 5}, {"use_tis": True, "tis_clip": 5.0}),
    ],
)
def test_a_flag_wins_over_the_file_whatever_either_calls_a_setting(tmp_path, file, flags, expected):
    path = tmp_path / "run.toml"
    path.write_text(f"[algorithm]\n{file}\n")
    assert load_config(path, flags) == config_of(expected)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("[algorithm.tis]\nclop = 3", "unknown key `algorithm.tis.clop`. Did you mean `tis_clip`?"),
        (
            "[algorithm.tis]\nclip = 3",
            "tis_clip has no effect without correction = tis; choose it, or ",
        ),
        ('[algorithm]\ncorrection = "tis"\ntis = 3', "[algorithm.tis] must be a table of settings, got 3."),
        ("[rollout]\nuse_tis = true", "unknown key `rollout.use_tis`. It belongs in section [algorithm]"),
    ],
)
def test_a_mistake_in_a_table_is_one_sentence(tmp_path, file, message):
    path = tmp_path / "run.toml"
    path.write_text(file)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ALGORITHM)
def test_what_was_written_reads_back_equal(tmp_path, name):
    setting = ALGORITHM[name]
    config = config_of({**setting.under, name: setting.value})
    write_toml(config, tmp_path / "config.toml")
    assert parse(RunConfig, read_toml(tmp_path / "config.toml"), source="x") == config
    if config.algorithm.correction.name != "tis":
        assert "tis_clip" not in effective_values(config)["algorithm"]


def test_adam_is_adamw_and_a_temperature_of_zero_is_greedy():
    assert config_of({"optimizer": "adam"}) == config_of({"optimizer": "adamw"})
    assert config_of({"eval_temperature": 0}).eval.eval_temperature == 0


SERVERS = {"engine": "sglang", "sglang_url": "http://127.0.0.1:1"}
# What a setting of another section is given, and what it has no effect under.
WITHOUT_RL = {"num_rollout": 0, "warm_start_steps": 1}
INACTIVE = {
    "only_train_params_name_list": (("mlp",), {"lora_rank": 2}),
    "freeze_params_name_list": (("embed_tokens",), {"lora_rank": 2}),
    "optimizer_cpu_offload": (True, {}),
    "device": ("cuda", {"trainer": "megatron"}),
    **{
        name: (64, {"hf_checkpoint": "x"})
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "vocab_size")
    },
    "num_attention_heads": (4, {"hf_checkpoint": "x"}),
    "num_query_groups": (1, {"hf_checkpoint": "x"}),
    "rotary_base": (5e3, {"hf_checkpoint": "x"}),
    **dict.fromkeys(OF_STALENESS, (True, {})),
    "sft_data": ("x.jsonl", {}),
    "eval_sft_data": ("x.jsonl", {}),
    "messages_key": ("x", {}),
    "tools_key": ("x", {}),
    "min_reward": (1.0, {}),
    "num_epoch": (2, {}),
    "sft_batch_size": (8, {}),
    "sft_lr": (0.1, {}),
    "warm_start_batch_size": (8, {}),
    "warm_start_lr": (0.1, {}),
    "warm_start_split": ("demo", {}),
    "num_demonstrations": (8, {}),
    "chat_format": ("qwen3", {"dialect": "inline"}),
    **{name: ("x", {}) for name in ("input_key", "label_key", "metadata_key", "tool_key")},
    "prompt_data": ("x.jsonl", {"data_source_path": "x:y"}),
    "rollout_shuffle": (True, {"data_source_path": "x:y"}),
    "train_split": ("demo", {"data_source_path": "x:y"}),
    "inline": (True, {"trainer": "megatron", **SERVERS}),
    "privileged_context_path": ("x:y", {}),
    "min_lr": (1e-6, {}),
    "lr_decay_iters": (9, {}),
    **{
        name: (2, {"actor_num_gpus_per_node": 2})
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    },
    # Two layers cannot be shared out so.
    **{
        f"decoder_{end}_pipeline_num_layers": (
            3,
            {"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
        )
        for end in ("first", "last")
    },
    "num_virtual_stages_per_pipeline_rank": (
        2,
        {"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
    ),
    **{
        name: (2, {"actor_num_gpus_per_node": 2})
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")
    },
    "sequence_parallel": (True, {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2}),
    "fsdp_size": (2, {}),
    "use_distributed_optimizer": (True, {}),
    "offload": (True, {}),
    "recompute_granularity": ("full", {}),
    "megatron_config": ({"x": 1}, {}),
    **{
        name: ("x:y", {})
        for name in (
            "custom_megatron_init_path",
            "custom_model_provider_path",
            "custom_megatron_before_log_prob_hook_path",
            "custom_megatron_before_train_step_hook_path",
            "custom_megatron_after_train_step_hook_path",
            "custom_megatron_before_save_hook_path",
        )
    },
    "ray_address": ("127.0.0.1:1", {}),
    "placement_timeout_s": (1.0, {}),
    "num_cpus_per_rank": (2.0, {}),
    "num_gpus_per_rank": (1, {"cluster": "ray"}),
    "num_cpus_per_server": (2.0, {"cluster": "ray"}),
    "num_cpus_per_rollout_worker": (2.0, {"cluster": "ray"}),
    "ray_env_vars": (["HOME"], {}),
    "enable_deterministic_inference": (True, SERVERS),
    "engine_dtype": ("bfloat16", SERVERS),
    "eval_engine": ("own", {"async_eval": True, **SERVERS}),
    "update_weights_transport": ("disk", {}),
    "pin_policy_version": (True, SERVERS),
    "adaptive_concurrency": (True, {}),
    "rollout_num_engines": (2, SERVERS),
    "rollout_num_gpus_per_engine": (1, SERVERS),
    "sglang_python": ("python", SERVERS),
    "num_gpus_per_node": (8, {}),
    "router": ({"policy": "random"}, SERVERS),
    "rollout_health_check_interval": (1.0, {}),
    "rollout_health_check_timeout": (1.0, {}),
    "rollout_health_check_first_wait": (1.0, {}),
    "wandb_project": ("x", {}),
    "wandb_group": ("x", {}),
    "wandb_mode": ("offline", {}),
    "prometheus_host": ("127.0.0.2", {}),
    "prometheus_port": (1, {}),
    "profile_step": (41, {"num_rollout": 40}),
    "memory_snapshot_step": (1, WITHOUT_RL),
    "profile_engine_step": (1, {}),
}
# A validator refuses these with a sentence of its own.
REFUSED_ANYWAY = {"sglang_url", "sglang", "sglang_groups"}
CONTEXTS = (
    *({}, {"trainer": "megatron", **SERVERS}, {"hf_checkpoint": "x"}, {"dialect": "inline"}, SERVERS),
    {"data_source_path": "x:y"},
    {"lora_rank": 2},
    WITHOUT_RL,
)


def file_with(path, settings):
    """A run file with these settings, each in its section."""
    path.write_text(tomli_w.dumps(by_section(RunConfig, settings)))
    return path


def test_every_setting_that_can_be_without_effect_is_here():
    inactive = {name for context in CONTEXTS for name in config_of(context).inactive}
    assert inactive == set(INACTIVE) | REFUSED_ANYWAY
    assert not inactive & set(ALGORITHM)


@pytest.mark.parametrize("name", INACTIVE)
def test_a_setting_without_effect_is_refused_where_it_is_given_and_listed_where_a_file_holds_it(
    tmp_path, name
):
    value, under = INACTIVE[name]
    file = file_with(tmp_path / "run.toml", under)
    with pytest.raises(ConfigError) as caught:
        load_config(file, {name: value})
    assert f"{name} has no effect with" in str(caught.value)
    assert str(caught.value).endswith(f", or leave {name} out.")
    config = load_config(file_with(file, {**under, name: value}), {})
    assert any(name in line and line.startswith("No effect here: ") for line in listed_inactive(config))
    write_toml(config, tmp_path / "config.toml")
    assert parse(RunConfig, read_toml(tmp_path / "config.toml"), source="x") == config
    assert name in effective_values(config)[leaves(RunConfig)[name][0]]


def test_what_nobody_set_is_neither_listed_nor_written():
    config = config_of({})
    assert list(listed_inactive(config)) == []
    # Of a layout the torch trainer has the number of its ranks.
    assert set(effective_values(config)["layout"]) == set(RanksConfig.model_fields)
    assert "warm_start_lr" not in effective_values(config)["warm_start"]


@pytest.mark.parametrize("name", ["offload", "use_distributed_optimizer"])
def test_what_is_switched_off_is_not_refused(name):
    assert config_of({name: False}).trainer.trainer == "torch"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"openai_url": "http://127.0.0.1:1", "openai_model": "m", "max_slots": 9}, "max_slots"),
        ({"openai_url": "http://127.0.0.1:1", "openai_model": "m", "dialect": "chat"}, "dialect"),
        ({"update_weights_transport": "disk"}, "update_weights_transport"),
        ({"rollout_health_check_timeout": 1.0}, "rollout_health_check_timeout"),
    ],
)
def test_an_evaluation_refuses_what_changes_nothing_in_it(settings, name):
    with pytest.raises(ConfigError, match=f"{name} has no effect with"):
        agentrl.evaluate("Capitals-v0", None if "openai_url" in settings else "nowhere", **settings)


def is_reader(node) -> bool:
    """A function that uses settings, rather than one that checks or lists them."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    checks = any("validator" in ast.unparse(one) for one in node.decorator_list)
    return not checks and not node.name.startswith("_of_other") and node.name not in ("warnings", "inactive")


def test_every_setting_is_read_by_what_it_configures():
    read: set[str] = set()
    for path in Path(agentrl.__file__).parent.rglob("*.py"):
        readers = [node for node in ast.walk(ast.parse(path.read_text())) if is_reader(node)]
        read |= {n.attr for one in readers for n in ast.walk(one) if isinstance(n, ast.Attribute)}
    keys = AlgorithmConfig.keys()
    nested = {
        keys.name_in(field, kind, key): key
        for field, kinds in keys.kinds.items()
        for kind in kinds
        for key in kind.model_fields
    }
    assert {name for name in leaves(RunConfig) if nested.get(name, name) not in read} == set()


TABLES = (
    *("gdpo", "gigpo", "rae", "shaping", "hierarchy", "sapo", "vespo", "dppo", "clip_cov", "kl_cov"),
    *("top_entropy", "opd", "tis", "mis", "icepop", "opsm", "gate"),
)


@pytest.mark.parametrize("name", ALGORITHM)
def test_whatever_a_run_writes_may_be_written_in_tables_and_empty_ones_change_nothing(name):
    config = config_of({**ALGORITHM[name].under, name: ALGORITHM[name].value})
    written = effective_values(config)
    tables: dict[str, dict[str, object]] = {table: {} for table in TABLES}
    for key in list(written["algorithm"]):
        if (table := next((table for table in TABLES if key.startswith(f"{table}_")), None)) is not None:
            tables[table][key.removeprefix(f"{table}_")] = written["algorithm"].pop(key)
    written["algorithm"] |= tables
    assert parse(RunConfig, written, source="x") == config


FORMS = [
    '[algorithm]\ncorrection = "mis"\nmis_level = "token"\nmis_upper = 3.0',
    '[algorithm]\ncorrection = "mis"\n[algorithm.mis]\nlevel = "token"\nupper = 3.0',
    '[algorithm]\ncorrection = {name = "mis", level = "token", upper = 3.0}',
    '[algorithm]\nuse_mis = true\n[algorithm.correction]\nlevel = "token"\nupper = 3.0',
]


@pytest.mark.parametrize("form", FORMS)
def test_the_keys_of_a_variant_may_be_written_flat_or_as_a_table(tmp_path, form):
    path = tmp_path / "run.toml"
    path.write_text(form)
    settings = {"correction": "mis", "mis_level": "token", "mis_upper": 3.0}
    assert load_config(path, {}) == config_of(settings)
    # A flag wins over each of them, and the keys of a variant that it replaces are refused.
    assert load_config(path, {"mis_upper": 4.0}) == config_of({**settings, "mis_upper": 4.0})
    with pytest.raises(ConfigError, match="mis_level has no effect without correction = mis; choose it"):
        load_config(path, {"correction": "tis"})


def test_a_run_writes_flat_names(tmp_path):
    written = effective_values(config_of({"advantage_estimator": "gspo", "correction": "mis"}))["algorithm"]
    assert (written["advantage_estimator"], written["scale_rewards"]) == ("gspo", "group")
    assert (written["correction"], written["mis_level"]) == ("mis", "geometric")
    assert not {"mis_veto", "tis_clip", "gamma", "lambd"} & set(written)
    assert not any(isinstance(value, dict) and value for value in written.values())


@pytest.mark.parametrize("first", sorted(ESTIMATORS))
def test_what_was_written_of_one_estimator_leaves_another_its_own_defaults(tmp_path, first):
    write_toml(config_of({"advantage_estimator": first}), tmp_path / "config.toml")
    written = read_toml(tmp_path / "config.toml")["algorithm"]
    for name in ESTIMATORS:
        own = effective_values(config_of({"advantage_estimator": name}))["algorithm"]
        shared = {key: value for key, value in written.items() if key in own}
        config = parse(RunConfig, {"algorithm": {**shared, "advantage_estimator": name}}, source="x")
        assert config.algorithm == config_of({"advantage_estimator": name}).algorithm


def test_keys_that_variants_share_have_one_default():
    keys = AlgorithmConfig.keys()
    for field, kinds in keys.kinds.items():
        found: dict[str, set[str]] = {}
        for kind in kinds:
            for key, leaf in kind.model_fields.items():
                found.setdefault(keys.name_in(field, kind, key), set()).add(repr(leaf.default))
        shared = {name: values for name, values in found.items() if len(values) > 1 and name != field}
        assert shared == {}
