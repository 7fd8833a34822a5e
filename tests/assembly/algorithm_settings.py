"""Every setting of the algorithm: where it acts, where it is refused, and what other words stand for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Setting(NamedTuple):
    """Where a setting acts: `value` beside `under`, which alone it does nothing without.

    refused: what it is refused under, and what the sentence says of it; None: it acts wherever it is set.
    """

    value: object
    under: Mapping[str, object] = MappingProxyType({})
    refused: tuple[dict[str, object], str] | None = None


def of_estimator(value, name="ppo", **under):
    return Setting(value, {"advantage_estimator": name, **under}, ({}, "without advantage_estimator = "))


def of_correction(name, value, **under):
    return Setting(
        value,
        {"correction": name, **under},
        ({"correction": "none"}, f"without correction = {name}; choose it"),
    )


def of_control(name, value):
    # kl_cov needs a second optimizer step.
    under = {"entropy_control": name, "ppo_epochs": 2}
    return Setting(value, under, ({}, f"without entropy_control = {name}; choose it"))


OURS = "with custom_loss_function_path; drop that"
LOSS = {"custom_loss_function_path": "my_parts:loss"}
ESTIMATOR = {"custom_advantage_function_path": "my_parts:estimator"}
PPO = {"advantage_estimator": "ppo"}
OVERLONG = ({}, "without shaping_overlong_len; add it")
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
TAUGHT = {"use_opd": True, "opd_teacher_load": "nowhere"}
SERVED = {"use_opd": True, "opd_teacher_url": "http://127.0.0.1:1"}
SELF = {"use_opd": True, "privileged_context_path": "my_parts:context"}
WITHOUT_OPD = ({}, "without use_opd; add it")
REFERENCE = "without use_kl_loss or kl_coef, or opd_teacher = reference; add one"
ALGORITHM = {
    "advantage_estimator": Setting("rloo"),
    "custom_advantage_function_path": Setting("my_parts:estimator"),
    "custom_loss_function_path": Setting("my_parts:loss"),
    "scale_rewards": Setting(
        "batch", {}, ({"advantage_estimator": "rloo", "scale_rewards": "group"}, "choose another")
    ),
    "credit_level": Setting("turn", {"advantage_estimator": "rloo"}, ({}, "compares a turn")),
    "gamma": Setting(
        0.9, {"advantage_estimator": "ppo"}, ({}, "without advantage_estimator = rloo, gigpo, gspo")
    ),
    "discount_per": of_estimator("turn", gamma=0.9),
    "lambd": of_estimator(0.9),
    "normalize_advantages": Setting(True),
    "loss_weighting": Setting("sample"),
    "ppo_epochs": Setting(2),
    "gdpo_weights": of_estimator({"env": 1.0}, "gdpo"),
    "gigpo_step_advantage_weight": of_estimator(0.5, "gigpo"),
    "hierarchy_roles": Setting(
        {"agent": "any"}, {}, (PPO, "with ppo, which compares no siblings; choose one")
    ),
    "hierarchy_reward_shares": Setting({"a": {"b": 0.5}}),
    "shaping_scale": Setting(2.0),
    "shaping_low": Setting(-1.0),
    "shaping_high": Setting(1.0),
    "shaping_turn_penalty": Setting(0.1),
    "shaping_overlong_len": Setting(8),
    "shaping_overlong_buffer_len": Setting(4, {"shaping_overlong_len": 8}, OVERLONG),
    "shaping_overlong_penalty": Setting(0.5, {"shaping_overlong_len": 8}, OVERLONG),
    "eps_clip": Setting(0.1, {}, (LOSS, OURS)),
    "eps_clip_high": Setting(0.3, {}, (LOSS, OURS)),
    "eps_clip_c": Setting(3.0, {}, (LOSS, OURS)),
    "sapo_tau_positive": of_estimator(2.0, "sapo"),
    "sapo_tau_negative": of_estimator(2.0, "sapo"),
    "vespo_k_positive": of_estimator(1.0, "vespo"),
    "vespo_lambda_positive": of_estimator(1.0, "vespo"),
    "vespo_k_negative": of_estimator(1.0, "vespo"),
    "vespo_lambda_negative": of_estimator(1.0, "vespo"),
    "dppo_divergence": of_estimator("kl", "dppo"),
    "value_clip": of_estimator(0.5),
    "bootstrap_truncated": of_estimator(True),
    "entropy_coef": Setting(0.01, {}, (LOSS, OURS)),
    "entropy_target": Setting(0.5, {}, (LOSS, OURS)),
    "entropy_coef_step": Setting(0.01, {"entropy_target": 0.5}, ({}, "without entropy_target; add it")),
    "kl_target": Setting(0.1, KL_LOSS, ({}, "without use_kl_loss or kl_coef; add one")),
    "kl_horizon": Setting(100.0, {**KL_LOSS, "kl_target": 0.1}, (KL_LOSS, "without kl_target; add it")),
    "ref_update_interval": Setting(4, KL_LOSS, ({}, REFERENCE)),
    "ref_mixup_alpha": Setting(
        0.5, {**KL_LOSS, "ref_update_interval": 4}, (KL_LOSS, "without ref_update_interval; add it")
    ),
    "rae_decay": of_estimator(0.5, "rae"),
    "entropy_control": Setting("clip_cov"),
    "clip_cov_ratio": of_control("clip_cov", 0.1),
    "clip_cov_low": of_control("clip_cov", 0.5),
    "clip_cov_high": of_control("clip_cov", 2.0),
    "kl_cov_ratio": of_control("kl_cov", 0.1),
    "kl_cov_coef": of_control("kl_cov", 0.5),
    "top_entropy_quantile": of_control("top_entropy", 0.5),
    "kl_coef": Setting(0.1, {}, (ESTIMATOR, "with custom_advantage_function_path; drop that")),
    "use_kl_loss": Setting(True),
    "kl_loss_coef": Setting(0.1, {"use_kl_loss": True}, ({}, "without use_kl_loss; add it")),
    "kl_loss_type": Setting("k2", KL_LOSS, ({"kl_coef": 0.1}, "without use_kl_loss; add it")),
    "use_unbiased_kl": Setting(True, KL_LOSS, ({}, "without use_kl_loss; add it")),
    "ref_load": Setting("nowhere", KL_LOSS, ({}, REFERENCE)),
    "use_opd": Setting(True, {"opd_teacher_load": "nowhere"}, ({}, "use_opd needs one teacher")),
    "opd_kl_coef": Setting(0.5, TAUGHT, WITHOUT_OPD),
    "opd_only": Setting(True, TAUGHT, WITHOUT_OPD),
    "opd_teacher": Setting("reference", {**SELF, "opd_teacher": "self"}, WITHOUT_OPD),
    "opd_teacher_load": Setting("nowhere", {"use_opd": True}, WITHOUT_OPD),
    "opd_teacher_url": Setting("http://127.0.0.1:1", {"use_opd": True}, WITHOUT_OPD),
    "opd_teacher_key_env": Setting("HOME", SERVED, (TAUGHT, "without opd_teacher_url; add it")),
    "opd_teacher_timeout_s": Setting(9.0, SERVED, (TAUGHT, "without opd_teacher_url; add it")),
    "opd_teacher_concurrency": Setting(2, SERVED, (TAUGHT, "without opd_teacher_url; add it")),
    "use_rollout_logprobs": Setting(False),
    "correction": Setting("tis"),
    "self_normalize_correction": Setting(
        True, {"correction": "tis"}, ({"correction": "opsm"}, "without correction = ")
    ),
    "gate_statistic": Setting("k3"),
    "gate_over": Setting(
        "max", {"gate_statistic": "k2"}, ({}, "without gate_statistic = k1, k2 or k3; choose it")
    ),
    "gate_lower": Setting(
        -1.0, {"gate_statistic": "k1"}, ({"gate_statistic": "k3"}, "without gate_statistic = k1")
    ),
    "gate_upper": Setting(
        0.5, {"gate_statistic": "k2"}, ({}, "without gate_statistic = k1, k2 or k3; choose it")
    ),
    "tis_clip": of_correction("tis", 3.0),
    "tis_clip_low": of_correction("tis", 0.5),
    "mis_level": of_correction("mis", "sequence"),
    "mis_mode": of_correction("mis", "clip"),
    "mis_lower": Setting(
        0.9, {"correction": "mis"}, ({"correction": "mis", "mis_mode": "truncate"}, "without mis_mode")
    ),
    "mis_upper": of_correction("mis", 1.1),
    "mis_veto": of_correction("mis", 1e-4),
    "custom_pg_loss_reducer_function_path": Setting(
        "tests.flow.worlds:every_rollout",
        {},
        ({"loss_weighting": "sample"}, "takes the place of loss_weighting = sample; leave one out"),
    ),
    "rollout_data_postprocess_path": Setting("tests.flow.own_functions:likely"),
    "custom_tis_function_path": Setting(
        "tests.run.test_proximal_in_step:halved",
        {"correction": "custom", "custom_tis_function_path": "tests.run.test_proximal_in_step:doubled"},
        ({"correction": "none"}, "without correction = custom; choose it"),
    ),
    "icepop_low": of_correction("icepop", 0.4),
    "icepop_high": of_correction("icepop", 4.0),
    "opsm_delta": of_correction("opsm", 0.1),
    "critic_lr": of_estimator(1e-2),
    "critic_lr_warmup_iters": of_estimator(7),
    "critic_weight_decay": of_estimator(0.3),
    "num_critic_only_steps": of_estimator(3),
    "critic_data": of_estimator("runs/earlier"),
    "critic_data_epochs": Setting(
        2,
        {"advantage_estimator": "ppo", "critic_data": "runs/earlier"},
        ({"advantage_estimator": "ppo"}, "without critic_data; add it"),
    ),
}
# They act where tokens are older than the weights: see INACTIVE, and tests/run/test_older_tokens.py.
OF_STALENESS = ("accept_bias", "mask_offpolicy_in_partial_rollout")
# Each is the same as other settings.
SPELLED = {
    "use_tis": (True, {"correction": "tis"}),
    "use_mis": (True, {"correction": "mis"}),
    "use_icepop": (True, {"correction": "icepop"}),
    "use_opsm": (True, {"correction": "opsm"}),
    "tis_threshold": (3.0, {"tis_clip": 3.0}),
    "i_accept_bias": (True, {"accept_bias": True}),
    "use_critic": (True, {"advantage_estimator": "ppo"}),
    "calculate_per_token_loss": (True, {"loss_weighting": "token"}),
    "grpo_std_normalization": (False, {"scale_rewards": "none"}),
    "disable_grpo_std_normalization": (True, {"scale_rewards": "none"}),
}
