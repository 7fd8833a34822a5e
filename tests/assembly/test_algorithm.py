"""Names of the configuration become the algorithm that bears the name, and no other."""

from __future__ import annotations

import sys
from itertools import combinations
from statistics import mean, stdev
from typing import get_args

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl import losses
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.estimator_choice import ESTIMATORS, DppoConfig
from agentrl.algorithms.estimator_config import DualClippedConfig, Objective
from agentrl.assembly.algorithm import (
    build_algorithm,
    build_estimator,
    build_is_idle,
    build_loss,
    build_weights,
    roles_of,
)
from agentrl.errors import ConfigError
from agentrl.losses import KlTerm, PolicyLoss
from tests.algorithms.batches import EpisodeSpec, batch, flat, walk

# Groups of different sizes; rewards that are alike, negative, on turns; a history that was rewritten.
BATCH = batch(
    [
        EpisodeSpec((2, 1), 1.0),
        EpisodeSpec((3,), 0.0),
        EpisodeSpec((1, 1, 2), 0.5, (None, 0.5, 0.0), split=1),
    ],
    [EpisodeSpec((2,), 0.25), EpisodeSpec((1, 2), 0.75, (0.5, 0.25))],
    [EpisodeSpec((1,), 1.0), EpisodeSpec((4,), 1.0)],
    gap=2.0,
)
MAX_LENGTH = 10


def built(**settings):
    config = AlgorithmConfig(**settings)
    credit = BATCH.credit(build_estimator(config))
    weights = build_weights(config, MAX_LENGTH)(BATCH.samples_by_group)
    return np.array(flat(BATCH, credit.advantages)), np.array(flat(BATCH, weights)), build_loss(config)


def rewards():
    """Of each trainable token: its group's rewards, its episode's own, and where it stands."""
    by_id = {v.rollout_id: (g, v.total) for g in BATCH.groups for v in g.verdicts}
    for id, tokens in walk(BATCH.samples).items():
        group, own = by_id[id]
        for token in tokens:
            yield [v.total for v in group.verdicts], own, token


def in_deviations(siblings, own):
    return (own - mean(siblings)) / (stdev(siblings) + 1e-6)


FORMULAS = {
    "grpo": in_deviations,
    "gspo": in_deviations,
    "gmpo": in_deviations,
    "cispo": in_deviations,
    "sapo": in_deviations,
    "vespo": in_deviations,
    "dppo": in_deviations,
    "gpg": lambda siblings, own: 1.4 * (own - mean(siblings)),
    "grpo_passk": lambda siblings, own: (
        (own - sorted(siblings)[-2]) / (stdev(siblings) + 1e-6) if own == max(siblings) else 0.0
    ),
    "dr_grpo": lambda siblings, own: own - mean(siblings),
    "rloo": lambda siblings, own: own - (sum(siblings) - own) / (len(siblings) - 1),
    "maxrl": lambda siblings, own: own / mean(siblings) - 1,
}
"""Advantages of the estimators that compare whole episodes."""


@pytest.mark.parametrize("name", FORMULAS)
def test_a_name_that_compares_episodes_is_its_formula(name):
    expected = [FORMULAS[name](siblings, own) for siblings, own, _ in rewards()]
    assert built(advantage_estimator=name)[0] == pytest.approx(expected, abs=1e-5)


def test_no_two_names_are_the_same_algorithm():
    # remax needs a sibling that was played greedily: tests/algorithms/test_greedy_baseline.py.
    names = [name for name in ESTIMATORS if name != "remax"]
    by_name = {name: built(advantage_estimator=name) for name in names}
    for name, other in combinations(names, 2):
        (a, w, loss), (b, v, another) = by_name[name], by_name[other]
        assert not (np.allclose(a, b) and np.allclose(w, v) and loss == another), (name, other)


@pytest.mark.parametrize(
    ("name", "objective", "eps"),
    [
        ("grpo", "clip", (0.2, 0.28)),
        ("gspo", "gspo", (3e-4, 4e-4)),
        ("cispo", "cispo", (1.0, 4.0)),
        ("gmpo", "gmpo", (0.4, 0.4)),
        ("dppo", "dppo_tv", (0.15, 0.15)),
        ("ppo", "clip", (0.2, 0.28)),
    ],
)
def test_a_name_brings_its_loss_and_bounds_that_were_given_stand(name, objective, eps):
    loss = build_loss(AlgorithmConfig(advantage_estimator=name))
    assert (loss.objective, (loss.eps_clip, loss.eps_clip_high)) == (objective, eps)
    loss = build_loss(AlgorithmConfig(advantage_estimator=name, eps_clip=0.1, eps_clip_high=0.7))
    assert (loss.eps_clip, loss.eps_clip_high) == (0.1, 0.7)


def test_weights_follow_the_name_or_what_was_said():
    n = len(list(rewards()))
    token, constant = 1 / n, 1 / (7 * MAX_LENGTH)
    assert built()[1] == pytest.approx(np.full(n, token))
    assert built(advantage_estimator="dr_grpo")[1] == pytest.approx(np.full(n, constant))
    assert built(loss_weighting="constant")[1] == pytest.approx(np.full(n, constant))
    counts = [len(s.loss_mask.nonzero()[0]) for s in BATCH.samples]
    sample = [1 / (len(BATCH.samples) * counts[t.sample]) for _, _, t in rewards()]
    assert built(advantage_estimator="gspo")[1] == pytest.approx(sample)
    rollout = {s.rollout_id: 0 for s in BATCH.samples}
    for sample_, count in zip(BATCH.samples, counts, strict=True):
        rollout[sample_.rollout_id] += count
    share = [1 / (7 * rollout[BATCH.samples[t.sample].rollout_id]) for _, _, t in rewards()]
    assert built(loss_weighting="rollout")[1] == pytest.approx(share)


# Its advantages are nowhere 0, so that every factor shows.
CRITIC = {"advantage_estimator": "ppo"}
ONLY = {"use_opd": True, "opd_teacher_load": "x", "opd_only": True}
SETTINGS = [
    {"scale_rewards": "none"},
    {"scale_rewards": "batch"},
    {"normalize_advantages": True},
    {"advantage_estimator": "rloo", "credit_level": "turn"},
    {"advantage_estimator": "rloo", "credit_level": "turn", "gamma": 0.5},
    {"advantage_estimator": "ppo", "gamma": 0.5},
    {"advantage_estimator": "ppo", "lambd": 0.5},
    {"advantage_estimator": "ppo", "gamma": 0.5, "discount_per": "turn"},
    {"advantage_estimator": "ppo", "normalize_advantages": False},
    {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.5},
    {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.5, "discount_per": "turn"},
    {"kl_coef": 0.3},
    {"advantage_estimator": "ppo", "kl_coef": 0.3},
    {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.3},
    {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.3},
    {"use_opd": True, "opd_teacher_load": "x", "opd_kl_coef": 0.5},
    {"use_opd": True, "opd_teacher_load": "x", "opd_kl_coef": 1.0},
    ONLY,
    {**CRITIC, "use_tis": True},
    {**CRITIC, "use_tis": True, "tis_clip": 1.1},
    {**CRITIC, "use_tis": True, "tis_clip_low": 0.9},
    {**CRITIC, "use_mis": True, "mis_lower": 0.5, "mis_upper": 2.0},
    {**CRITIC, "use_mis": True, "mis_level": "token"},
    {**CRITIC, "use_mis": True, "mis_level": "sequence"},
    {**CRITIC, "use_mis": True, "mis_level": "token", "mis_mode": "clip"},
    {**CRITIC, "use_mis": True, "mis_level": "token", "mis_mode": "truncate", "mis_upper": 1.5},
    {**CRITIC, "use_mis": True, "mis_level": "token", "mis_mode": "clip", "mis_lower": 0.8},
    {**CRITIC, "use_mis": True, "mis_level": "token", "mis_mode": "clip", "mis_upper": 1.3},
    {**CRITIC, "use_mis": True, "mis_lower": 0.5, "mis_upper": 2.0, "mis_veto": 0.3},
    {**CRITIC, "use_tis": True, "self_normalize_correction": True},
    {**CRITIC, "use_mis": True, "mis_level": "sequence", "self_normalize_correction": True},
    {**CRITIC, "gate_statistic": "k1", "gate_upper": 0.3},
    {**CRITIC, "gate_statistic": "k1", "gate_upper": 0.3, "gate_lower": -0.1},
    {**CRITIC, "gate_statistic": "k2", "gate_over": "token"},
    {**CRITIC, "gate_statistic": "k3", "gate_upper": 0.3},
    {**CRITIC, "gate_statistic": "k3", "gate_over": "token"},
    {**CRITIC, "gate_statistic": "k3", "gate_over": "max", "gate_upper": 2.5},
    {**CRITIC, "gate_statistic": "k3", "gate_upper": 0.3, "use_tis": True},
    {**CRITIC, "use_icepop": True},
    {**CRITIC, "use_icepop": True, "icepop_low": 0.9},
    {**CRITIC, "use_icepop": True, "icepop_high": 1.2},
]


def test_each_setting_of_credit_changes_it_in_its_own_way():
    built_by_setting = [built(**settings)[:2] for settings in [{}, {"advantage_estimator": "ppo"}, *SETTINGS]]
    for i, j in combinations(range(len(built_by_setting)), 2):
        same = all(np.allclose(a, b) for a, b in zip(built_by_setting[i], built_by_setting[j], strict=True))
        assert not same, (SETTINGS[i - 2], SETTINGS[j - 2])


def test_opo_counts_a_sibling_as_often_as_it_has_tokens():
    lengths = {id: len(tokens) for id, tokens in walk(BATCH.samples).items()}
    expected = []
    for id, tokens in walk(BATCH.samples).items():
        verdicts = next(g.verdicts for g in BATCH.groups if id in {v.rollout_id for v in g.verdicts})
        total = sum(lengths[v.rollout_id] for v in verdicts)
        weighted = sum(lengths[v.rollout_id] * v.total for v in verdicts) / total
        own = next(v.total for v in verdicts if v.rollout_id == id)
        expected += [own - weighted] * len(tokens)
    assert built(advantage_estimator="opo")[0] == pytest.approx(expected, abs=1e-6)


def test_sapo_vespo_and_dppo_bring_settings_of_their_own():
    kernels = {"vespo_k_positive": 1.0, "vespo_lambda_negative": 4.0}
    loss = build_loss(AlgorithmConfig(advantage_estimator="vespo", **kernels))
    assert (loss.objective, loss.vespo) == ("vespo", ((1.0, 3.0), (3.0, 4.0)))
    loss = build_loss(AlgorithmConfig(advantage_estimator="sapo", sapo_tau_positive=2.0))
    assert (loss.objective, loss.sapo_tau) == ("sapo", (2.0, 1.05))
    loss = build_loss(AlgorithmConfig(advantage_estimator="dppo", dppo_divergence="kl"))
    assert (loss.objective, loss.eps_clip, loss.eps_clip_high) == ("dppo_kl", 0.05, 0.05)
    loss = build_loss(AlgorithmConfig(advantage_estimator="dppo", dppo_divergence="kl", eps_clip=0.1))
    assert (loss.eps_clip, loss.eps_clip_high) == (0.1, 0.05)


def test_names_of_objectives_are_those_of_the_losses():
    assert get_args(Objective) == get_args(losses.Objective) == tuple(losses.OBJECTIVES)
    kinds = [*(kind() for kind in ESTIMATORS.values()), DppoConfig(divergence="kl")]
    dual_clipped = {kind.loss_objective for kind in kinds if isinstance(kind, DualClippedConfig)}
    assert {kind.loss_objective for kind in kinds} == set(get_args(Objective))
    for name in get_args(Objective):
        if name in dual_clipped:
            assert PolicyLoss(objective=name, eps_clip_c=3.0)
        else:
            with pytest.raises(ValueError, match="no dual clip"):
                PolicyLoss(objective=name, eps_clip_c=3.0)


def test_each_setting_of_the_loss_reaches_it():
    config = AlgorithmConfig(
        eps_clip_c=3.0,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        kl_loss_type="k2",
        use_unbiased_kl=True,
        use_opsm=True,
        opsm_delta=0.1,
    )
    kl = KlTerm(0.2, "k2", unbiased=True)
    assert build_loss(config) == PolicyLoss(eps_clip_c=3.0, entropy_coef=0.01, kl=kl, opsm_delta=0.1)


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, ()),
        ({"use_rollout_logprobs": False}, ("old",)),
        ({"use_tis": True}, ("old",)),
        ({"use_mis": True, "use_kl_loss": True}, ("old", "ref")),
        ({"use_icepop": True, "kl_coef": 0.1}, ("old", "ref")),
        ({"gate_statistic": "k3"}, ("old",)),
        ({"use_opd": True, "opd_teacher_load": "x"}, ()),
        ({"advantage_estimator": "ppo"}, ("values",)),
    ],
)
def test_those_are_scored_who_are_asked(settings, roles):
    assert roles_of(AlgorithmConfig(**settings)) == roles


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({"accept_bias": True}, ("old",)),
        ({"use_opsm": True}, ("old",)),
        ({"use_opsm": True, "use_rollout_logprobs": True}, ()),
        ({"advantage_estimator": "dppo"}, ()),
        ({"advantage_estimator": "dppo", "use_tis": True}, ("old",)),
    ],
)
def test_the_trainer_scores_what_older_weights_sampled_unless_it_is_switched_off(settings, roles):
    assert roles_of(AlgorithmConfig(**settings), is_async=True) == roles


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, 1),
        ({"advantage_estimator": "maxrl"}, 1),
        ({"use_tis": True}, 1),
        ({"advantage_estimator": "ppo"}, 0),
        ({"advantage_estimator": "reinforce_plus_plus"}, 0),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, 0),
        ({"normalize_advantages": True}, 0),
        ({"advantage_estimator": "rloo", "credit_level": "turn"}, 0),
        ({"use_kl_loss": True}, 0),
        ({"kl_coef": 0.1}, 0),
        ({"use_opd": True, "opd_teacher_load": "x"}, 0),
        ({"entropy_coef": 0.1}, 0),
    ],
)
def test_groups_that_did_alike_are_idle_only_where_nothing_can_come_of_them(settings, idle):
    is_idle = build_is_idle(AlgorithmConfig(**settings))
    assert sum(map(is_idle, BATCH.groups)) == idle


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, True),
        ({"use_opsm": True}, True),
        ({"use_opd": True, "opd_teacher_load": "x"}, True),
        ({"advantage_estimator": "ppo"}, False),
        ({"use_kl_loss": True}, False),
        ({"entropy_coef": 0.1}, False),
    ],
)
def test_a_token_without_advantage_has_no_gradient_where_the_policy_term_is_alone(settings, expected):
    assert build_algorithm(AlgorithmConfig(**settings), max_length=9).policy_term_only == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_tis": True, "use_mis": True}, "use_tis and use_mis both set correction; choose one"),
        ({"correction": "tis", "use_opsm": True}, "correction and use_opsm both set correction; choose one"),
        ({"use_icepop": True, "use_rollout_logprobs": True}, "takes the engine's for both"),
        ({"gate_statistic": "k2", "use_rollout_logprobs": True}, "a gate compares the engine's"),
        ({"gate_statistic": "k1", "gate_lower": 0.5}, r"lower bound of gate \(0.5\) must be below"),
        ({"use_opsm": True, "custom_loss_function_path": "a:b"}, "opsm is a part of the policy loss"),
        (
            {"use_tis": True, "tis_clip_low": 3.0},
            r"lower bound of tis_clip \(3\) must be below the upper \(2\)",
        ),
        (
            {"use_mis": True, "mis_lower": 1.5},
            r"lower bound of mis \(1.5\) must be below the upper \(1.001\)",
        ),
        ({"kl_coef": 0.1, "use_kl_loss": True}, "choose one"),
        ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False}, "whitened"),
        ({"credit_level": "turn"}, "choose rloo, gspo or cispo"),
        (
            {"advantage_estimator": "cispo", "eps_clip_c": 3.0},
            "eps_clip_c has no effect with advantage_estimator = cispo",
        ),
        ({"custom_loss_function_path": "somewhere"}, "custom_loss_function_path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)


OWN = """
import numpy as np
from agentrl.algorithms.advantages import Advantages
from agentrl.losses import LossOutput

def outcome(groups, tokens, scores):
    return Advantages(tokens.spread({v.rollout_id: v.total for g in groups for v in g.verdicts}))

def arrays_only(groups, tokens, scores):
    return np.ones(len(tokens))

def imitate(outputs, inputs):
    return LossOutput(-(inputs.weights_N * outputs.logp_N).sum(), {"nll": -outputs.logp_N.detach().sum()})

def averaged(outputs, inputs):
    return LossOutput(-(inputs.weights_N * outputs.logp_N).mean(), {})
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_algorithm", None)


@pytest.mark.usefixtures("own")
def test_an_estimator_and_a_loss_of_ones_own_are_found_and_tried_out():
    config = AlgorithmConfig(
        custom_advantage_function_path="my_algorithm:outcome",
        custom_loss_function_path="my_algorithm:imitate",
    )
    credit = BATCH.credit(build_estimator(config))
    assert flat(BATCH, credit.advantages) == pytest.approx([own for _, own, _ in rewards()])
    assert build_loss(config).__name__ == "imitate"
    assert not any(map(build_is_idle(config), BATCH.groups))
    assert not build_algorithm(config, max_length=9).policy_term_only


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        (
            "advantage",
            "my_algorithm:arrays_only",
            "my_algorithm:arrays_only: an estimator returns Advantages",
        ),
        ("advantage", "my_algorithm:nobody", "no estimator `my_algorithm:nobody`"),
        ("advantage", "my_algorithm:Advantages", "name a function, or an object that is one"),
        ("loss", "my_algorithm:averaged", "my_algorithm:averaged: "),
        ("loss", "nowhere:nobody", "no loss `nowhere:nobody`"),
    ],
)
def test_one_that_does_not_keep_its_promise_is_one_sentence(kind, path, message):
    config = AlgorithmConfig(**{f"custom_{kind}_function_path": path})
    with pytest.raises(ConfigError, match=message):
        build_estimator(config) if kind == "advantage" else build_loss(config)


@pytest.mark.parametrize(
    ("level", "bounds"), [("token", (0.5, 2.0)), ("sequence", (0.5, 2.0)), ("geometric", (0.999, 1.001))]
)
def test_bounds_of_mis_follow_its_level(level, bounds):
    assert AlgorithmConfig(correction="mis", mis_level=level).correction.bounds == bounds
    wide = AlgorithmConfig(correction="mis", mis_level=level, mis_upper=4.0)
    assert wide.correction.bounds == (bounds[0], 4.0)
