"""Layers that SGLang drafts with are trained where something is done with them; what stays behind is told."""

from __future__ import annotations

import pytest

from agentrl.assembly.load import load_config
from agentrl.errors import UserError

SERVED = {"engine": "sglang", "trainer": "megatron"}
ON = {"enable_mtp_training": True}
EAGLE = {"speculative-algorithm": "EAGLE"}
PATH = {"speculative_draft_model_path": "models/draft"}
REFUSED = {
    "by torch": ({"engine": "sglang"}, "needs trainer = megatron"),
    "for the embedded engine": ({"trainer": "megatron"}, "choose engine = sglang"),
    "over a process group": (
        {**SERVED, "update_weights_transport": "distributed"},
        "choose tensor or disk, or leave one out",
    ),
    "beside another draft": ({**SERVED, "sglang": {**EAGLE, **PATH}}, "leave one out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_they_are_trained_where_that_is_of_use(case):
    settings, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as refused:
        load_config(None, {**settings, **ON})
    assert len(str(refused.value).splitlines()) == 1
    load_config(None, settings)


def test_the_weight_of_a_loss_that_there_is_not_is_refused():
    with pytest.raises(UserError, match="mtp_loss_scaling_factor"):
        load_config(None, {**SERVED, "mtp_loss_scaling_factor": 0.5})
    load_config(None, {**SERVED, **ON, "mtp_loss_scaling_factor": 0.5})


def stale(settings) -> list[str]:
    return [text for text in load_config(None, settings).warnings if "drafts" in text]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"speculative_algorithm": "NGRAM"}, None),
        (EAGLE, "enable_mtp_training"),
        ({"speculative_algorithm": "nextn"}, "enable_mtp_training"),
        ({**EAGLE, **PATH}, "models/draft"),
    ],
)
def test_a_run_says_once_that_what_it_drafts_with_stays_as_it_is(arguments, expected):
    for trainer in ("torch", "megatron"):
        said = stale({"engine": "sglang", "trainer": trainer, "sglang": arguments})
        assert len(said) == (expected is not None)
        assert all(expected in text for text in said)
    in_a_group = [{"num_engines": 1, "sglang": arguments}]
    assert bool(stale({"engine": "sglang", "sglang_groups": in_a_group})) == (expected is not None)


def test_it_says_nothing_where_they_learn_or_nothing_does():
    assert stale({**SERVED, **ON, "sglang": EAGLE}) == []
    assert stale({"engine": "sglang", "sglang": EAGLE, "debug_rollout_only": True}) == []
