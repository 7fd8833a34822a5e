"""Above max_staleness 0 a run chooses a correction, or accepts the bias by name."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from tests.assembly.test_every_setting import config_of

CHOICES = "correction = tis (", "mis (", "icepop (", "opsm (", "(--correction none --i-accept-bias)."


@pytest.mark.parametrize("settings", [{}, {"correction": "none"}])
def test_older_weights_need_a_correction_and_the_sentence_names_the_choices(settings):
    with pytest.raises(ConfigError) as caught:
        config_of({"max_staleness": 2, **settings})
    sentence = str(caught.value)
    assert "max_staleness = 2 trains on tokens of older weights" in sentence
    assert all(choice in sentence for choice in CHOICES)
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"update_weights_interval": 3}, "update_weights_interval = 3 trains"),
        ({"over_sampling_batch_size": 64, "partial_rollout": True}, "partial_rollout trains"),
    ],
)
def test_whatever_makes_tokens_older_is_named(settings, name):
    with pytest.raises(ConfigError, match=f"{name} on tokens of older weights"):
        config_of(settings)
    assert config_of({**settings, "correction": "tis"})


@pytest.mark.parametrize(
    "settings",
    [
        *({"correction": name} for name in ("tis", "mis", "icepop", "opsm")),
        {"gate_statistic": "k3"},
        {"use_rollout_logprobs": True},
        {"advantage_estimator": "dppo"},
        *({"i_accept_bias": True}, {"debug_rollout_only": True}, {"num_rollout": 0}),
    ],
)
def test_a_correction_or_the_accepted_bias_allows_older_weights(settings):
    assert config_of({"max_staleness": 2, **settings}).rollout.max_staleness == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage_estimator": "gpg", "use_rollout_logprobs": True},
        {"advantage_estimator": "dppo", "use_rollout_logprobs": False},
    ],
)
def test_a_loss_without_a_ratio_to_the_engine_corrects_nothing(settings):
    with pytest.raises(ConfigError, match="leaves their bias in the gradient"):
        config_of({"max_staleness": 2, **settings})


def test_a_bias_that_is_corrected_cannot_be_accepted():
    with pytest.raises(ConfigError, match="accept_bias has no effect with correction = tis; drop that"):
        config_of({"max_staleness": 1, "correction": "tis", "accept_bias": True})
    with pytest.raises(ConfigError, match="accept_bias has no effect with a gate, which masks"):
        config_of({"max_staleness": 1, "gate_statistic": "k3", "accept_bias": True})


def test_a_penalty_for_leaving_the_first_steps_policy_needs_a_second_step():
    control = {"entropy_control": "kl_cov"}
    with pytest.raises(ConfigError, match="there is only one; set num_steps_per_rollout or ppo_epochs"):
        config_of(control)
    for more in ({"num_steps_per_rollout": 2}, {"ppo_epochs": 2}, {"use_rollout_logprobs": True}):
        config_of({**control, **more})
