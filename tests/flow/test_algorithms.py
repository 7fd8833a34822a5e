"""Every estimator trains an agent, each with other things beside it."""

from __future__ import annotations

import math

import pytest

import agentrl
from agentrl.errors import UserError
from agentrl.records import reconcile
from tests.flow.runs import EPISODES_PER_STEP, TINY, WARM, metrics_of, train
from tests.flow.worlds import Bandit

SINGLE = {"n_samples_per_prompt": 1, "rollout_batch_size": 64}
KINDS = {
    "ppo": {"critic_lr": 5e-3, "kl_coef": 0.01, "use_tis": True, "bootstrap_truncated": True, **SINGLE},
    "grpo": {"use_rollout_logprobs": False, "num_steps_per_rollout": 2},
    "dr_grpo": {"use_opsm": True, "opsm_delta": 0.05},
    "rloo": {"credit_level": "turn", "gamma": 0.9},
    "maxrl": {"use_mis": True, "mis_veto": 1e-4, "entropy_control": "clip_cov", "clip_cov_low": 0.1},
    "opo": {"gate_statistic": "k3", "use_tis": True, "self_normalize_correction": True},
    "gpg": {"ppo_epochs": 2, "entropy_control": "kl_cov", "kl_cov_ratio": 0.05},
    # In larger groups two siblings soon solve the task, and nothing is left to learn.
    "grpo_passk": {"scale_rewards": "batch", "n_samples_per_prompt": 2, "rollout_batch_size": 32},
    "gdpo": {"gdpo_weights": {"env": 1.0}},
    "otb": {"entropy_control": "top_entropy", "top_entropy_quantile": 0.6},
    "bnpo": {"loss_weighting": "prompt"},
    "gigpo": {"gamma": 0.95, "gigpo_step_advantage_weight": 0.5},
    "gspo": {"eps_clip_c": 3.0},
    "gmpo": {"shaping_turn_penalty": 0.01},
    "sapo": {"sapo_tau_negative": 1.5},
    "vespo": {"vespo_k_positive": 1.0},
    "dppo": {"dppo_divergence": "kl"},
    "cispo": {
        **{"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_target": 0.1, "kl_horizon": 1000.0},
        **{"ref_update_interval": 5, "ref_mixup_alpha": 0.5, "entropy_target": 0.1},
    },
    "remax": {**SINGLE},
    "rae": {**SINGLE},
    "reinforce_plus_plus": {"gamma": 0.99, "discount_per": "turn", **SINGLE},
    "reinforce_plus_plus_baseline": {"use_icepop": True, "loss_weighting": "rollout"},
}
# With larger steps a run may fall back for one of them, and on some machines that is the last one.
STEADY = {"num_rollout": 16, "lr": 1e-3}
OWN_METRICS = {
    "ppo": {"value_loss", "value_explained_variance", "critic_lr", "ref_kl", "tis", "train_rollout_ess"},
    "grpo": {"train_rollout_kl", "train_rollout_max_ratio"},
    "dr_grpo": {"opsm_masked"},
    "maxrl": {"mis", "mis_masked", "mis_veto", "clip_cov_fraction"},
    "gpg": {"kl_cov_loss", "kl_cov_fraction"},
    "otb": {"top_entropy_fraction", "top_entropy_threshold"},
    "opo": {"gate_statistic", "gate_masked", "correction_norm", "tis_factor"},
    "gigpo": {"shared_states"},
    "gmpo": {"reward_shaping"},
    "gspo": {"pg_dual_clipfrac"},
    "cispo": {"kl_loss", "kl_coef", "entropy_coef"},
    "reinforce_plus_plus_baseline": {"icepop_clipfrac"},
}


@pytest.mark.parametrize(
    "name", [name if name == "ppo" else pytest.param(name, marks=pytest.mark.learning) for name in KINDS]
)
def test_an_agent_learns(tmp_path, name):
    settings = {**WARM, **STEADY, "advantage_estimator": name, **KINDS[name]}
    result = train("Bandit", tmp_path, name, **settings)
    before, after = (result.reports[at]["sampled"].mean for at in ("after warm start", "after RL"))
    assert before < 0.5
    assert after > 0.75
    rows = [row for row in metrics_of(result.folder) if "train/loss" in row]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert {f"train/{metric}" for metric in OWN_METRICS.get(name, ())} <= set(row)
        # On-policy, the engine and the trainer agree.
        assert row.get("train/train_rollout_ess", 1.0) == pytest.approx(1, abs=1e-3)
    assert reconcile(result.folder).problems == ()


@pytest.mark.learning
def test_a_teacher_teaches_where_rewards_do_not(tmp_path):
    teacher = train("Bandit", tmp_path, "teacher", num_rollout=10, **WARM)
    assert teacher.reports["after RL"]["sampled"].mean > 0.8
    settings = {
        **WARM,
        "num_rollout": 10,
        "advantage_estimator": "reinforce_plus_plus",
        "shuffle_rewards": True,
    }
    untaught = train("Bandit", tmp_path, "alone", **settings)
    load = {"use_opd": True, "opd_teacher_load": str(teacher.folder / "checkpoint"), "opd_kl_coef": 2.0}
    taught = train("Bandit", tmp_path, "taught", **settings, **load)
    gained = {run.folder.name: run.reports["after RL"]["sampled"].mean for run in (untaught, taught)}
    assert gained["alone"] < 0.55
    assert gained["taught"] > 0.7


@pytest.mark.full
def test_a_run_warns_of_a_correction_that_never_acts_and_takes_a_temperature_of_zero(tmp_path, capsys):
    settings = {"num_rollout": 3, "num_steps_per_rollout": 8, "lr": 1e-5, "eval_temperature": 0}
    result = agentrl.train(
        **{**TINY, **WARM, **settings},
        env="tests.flow.worlds:Bandit",
        output_dir=str(tmp_path),
        name="idle",
        use_tis=True,
    )
    assert capsys.readouterr().out.count("correction = tis changed no token in") == 1
    scores = result.reports["after RL"]
    assert scores["sampled"].mean == scores["greedy"].mean


class Debts(Bandit):
    """Dust costs."""

    def reward(self, task, answer):
        return 1.0 if super().reward(task, answer) else -1.0


def test_rewards_that_an_estimator_cannot_take_are_one_sentence(tmp_path):
    settings = {"env": f"{__name__}:Debts", "advantage_estimator": "maxrl", "num_rollout": 1}
    with pytest.raises(UserError, match="no credit can be given: maxrl divides by the mean reward"):
        train("Bandit", tmp_path, "x", **settings)
    books = reconcile(tmp_path / "x", played=EPISODES_PER_STEP)
    assert books.problems == ()
    assert books.dropped == {"run_stopped": EPISODES_PER_STEP}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_opd": True, "opd_teacher_load": "nowhere"}, "nowhere"),
        ({"use_kl_loss": True, "ref_load": "nowhere"}, "nowhere"),
        ({"custom_advantage_function_path": "nowhere:nobody"}, "no estimator `nowhere:nobody`"),
        ({"custom_loss_function_path": "nowhere:nobody"}, "no loss `nowhere:nobody`"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_played(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        train("Bandit", tmp_path, "x", num_rollout=1, **settings)
    assert not (tmp_path / "x" / "metrics.jsonl").exists()
