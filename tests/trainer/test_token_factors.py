"""A trainer's factors of tokens are those of the correction, and of loops in float64."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf

import numpy as np
import pytest
import torch

from agentrl.algorithms.corrections import Correction, CustomCorrection, FactorsInStep, IcePop, Mis, Tis
from agentrl.algorithms.gates import InStages, TokenGate
from agentrl.trainer.loss_inputs import token_factors
from tests.run.in_step import bounded, by_token, gated, mis
from tests.trainer.tiny import sample

CLIPPED = by_token(bounded(0.9, 1.1, "clip"))
CASES = {
    "tis": (Tis(1.1, 0.9), CLIPPED),
    "icepop": (IcePop(0.8, 1.25), by_token(bounded(0.8, 1.25, "mask"))),
    "mis truncate": (Mis("token", "truncate", 0.8, 1.25), mis("token", "truncate", 0.8, 1.25)),
    "mis clip": (Mis("token", "clip", 0.8, 1.25), mis("token", "clip", 0.8, 1.25)),
    "mis mask": (Mis("token", "mask", 0.8, 1.25), mis("token", "mask", 0.8, 1.25)),
    "weight alone": (InStages(Tis(1.1, 0.9)), CLIPPED),
}
for _statistic, _upper in (("k1", 0.25), ("k2", 0.03125), ("k3", 0.01)):
    _low = -0.25 if _statistic == "k1" else -inf
    _gate = TokenGate(_statistic, "token", _upper, _low)
    CASES[f"gate {_statistic}"] = (InStages(None, _gate), gated(_statistic, "token", _low, _upper))
    CASES[f"tis, gate {_statistic}"] = (
        InStages(Tis(1.1, 0.9), _gate),
        gated(_statistic, "token", _low, _upper, CLIPPED),
    )


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_numpy_and_of_loops(name):
    correction, loop = CASES[name]
    rng = np.random.default_rng(3)
    # A difference of 0.25 is exact: it is the bound of a gate.
    gaps = np.concatenate([[0.0, 0.25, -0.25, 15.0, -15.0], rng.normal(0, 0.2, 500)]).astype(np.float32)
    one = sample(rng, [0, *[1] * len(gaps)])
    one = replace(one, logprobs=np.round(one.logprobs))
    proximal = one.logprobs.copy()
    proximal[1:] += gaps
    exact = proximal[1:].astype(np.float64) - one.logprobs[1:].astype(np.float64)
    factors = correction.of_tokens
    assert factors is not None
    actual = token_factors(factors, torch.from_numpy(exact)).numpy()
    (ours,) = FactorsInStep(correction)([one], [proximal])
    np.testing.assert_array_equal(actual, ours[1:])
    np.testing.assert_allclose(actual, loop(exact.tolist()), rtol=1e-7)
    assert (actual != np.exp(exact).astype(np.float32)).any()


def test_log_ratios_are_bounded_and_what_is_no_number_stays_none():
    far = torch.tensor([900.0, -900.0, torch.nan], dtype=torch.float64)
    high, low, none = token_factors(Tis(1e12).of_tokens, far)
    assert (float(high), float(low)) == pytest.approx((exp(20), exp(-20)), rel=1e-6)
    assert none.isnan()


OF_SEQUENCES: dict[str, Correction] = {
    "veto": Mis("token", veto=0.1),
    "geometric": Mis("geometric"),
    "sequence": Mis("sequence"),
    "gate over a sequence": InStages(Tis(), TokenGate("k3", "mean")),
    "mean 1": InStages(Tis(), None, "token"),
    "gate over a gate": InStages(InStages(None, TokenGate("k1", "token")), TokenGate("k2", "token")),
    "custom": CustomCorrection(lambda tokens, scores: np.ones(len(tokens))),
}


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_what_depends_on_other_tokens_has_none(name):
    assert OF_SEQUENCES[name].of_tokens is None
