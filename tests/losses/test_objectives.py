"""Every objective and option against the oracle, in value, gradient and metrics, and against each other."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import (
    OBJECTIVES,
    KlTerm,
    LossInputs,
    LossKernel,
    PolicyLoss,
    TokenOutputs,
    check_loss,
)
from tests.losses.oracle import Options, Token, evaluate, slopes, tensors

VARIANTS: dict[str, tuple[PolicyLoss, Options]] = {
    "clip": (PolicyLoss(eps_clip_high=0.2), Options(high=0.2)),
    "clip-higher": (PolicyLoss(), Options()),
    "dual clip": (PolicyLoss(eps_clip_c=2.5), Options(ceiling=2.5)),
    "gspo": (PolicyLoss(objective="gspo"), Options("gspo")),
    "gspo, dual clip": (PolicyLoss(objective="gspo", eps_clip_c=1.3), Options("gspo", ceiling=1.3)),
    "cispo": (PolicyLoss(objective="cispo"), Options("cispo")),
    "cispo, no bound below": (
        PolicyLoss(objective="cispo", eps_clip=1.0, eps_clip_high=3.0),
        Options("cispo", low=1.0, high=3.0),
    ),
    "gmpo": (PolicyLoss(0.4, 0.4, objective="gmpo"), Options("gmpo", 0.4, 0.4)),
    "gmpo, bounds of their own": (PolicyLoss(0.1, 0.3, objective="gmpo"), Options("gmpo", 0.1, 0.3)),
    "sapo": (PolicyLoss(objective="sapo"), Options("sapo")),
    "sapo, sharper": (
        PolicyLoss(objective="sapo", sapo_tau=(2.0, 3.0)),
        Options("sapo", tau=(2.0, 3.0)),
    ),
    "vespo": (PolicyLoss(objective="vespo"), Options("vespo")),
    "vespo, other kernels": (
        PolicyLoss(objective="vespo", vespo=(LossKernel(1.0, 0.5), LossKernel(0.5, 2.0))),
        Options("vespo", kernels=((1.0, 0.5), (0.5, 2.0))),
    ),
    "dppo_tv": (PolicyLoss(0.15, 0.15, objective="dppo_tv"), Options("dppo_tv", 0.15, 0.15)),
    "dppo_tv, wider above": (PolicyLoss(0.15, 0.5, objective="dppo_tv"), Options("dppo_tv", 0.15, 0.5)),
    "dppo_tv, smaller weights": (
        PolicyLoss(0.15, 0.15, 2.0, objective="dppo_tv"),
        Options("dppo_tv", 0.15, 0.15, 2.0),
    ),
    "dppo_kl": (PolicyLoss(0.02, 0.02, objective="dppo_kl"), Options("dppo_kl", 0.02, 0.02)),
    "dppo_kl, wider below": (PolicyLoss(0.2, 0.02, objective="dppo_kl"), Options("dppo_kl", 0.2, 0.02)),
    "reinforce": (PolicyLoss(objective="reinforce"), Options("reinforce")),
    "entropy": (PolicyLoss(entropy_coef=0.03), Options(bonus=0.03)),
    "opsm": (PolicyLoss(opsm_delta=0.1), Options(delta=0.1)),
    "opsm, farther": (PolicyLoss(opsm_delta=0.4), Options(delta=0.4)),
    "gspo, opsm": (PolicyLoss(objective="gspo", opsm_delta=0.1), Options("gspo", delta=0.1)),
    "k1": (PolicyLoss(kl=KlTerm(0.3, "k1")), Options(kl=("k1", 0.3, False))),
    "k2": (PolicyLoss(kl=KlTerm(0.3, "k2")), Options(kl=("k2", 0.3, False))),
    "k3": (PolicyLoss(kl=KlTerm(0.3, "k3")), Options(kl=("k3", 0.3, False))),
    "low_var_kl": (PolicyLoss(kl=KlTerm(0.3)), Options(kl=("low_var_kl", 0.3, False))),
    "unbiased k1": (PolicyLoss(kl=KlTerm(0.3, "k1", True)), Options(kl=("k1", 0.3, True))),
    "unbiased k2": (PolicyLoss(kl=KlTerm(0.3, "k2", True)), Options(kl=("k2", 0.3, True))),
    "unbiased k3": (PolicyLoss(kl=KlTerm(0.3, "k3", True)), Options(kl=("k3", 0.3, True))),
    "everything": (
        PolicyLoss(0.1, 0.4, 1.8, "gspo", 0.02, KlTerm(0.1, "k3", True), 0.2),
        Options("gspo", 0.1, 0.4, 1.8, 0.02, ("k3", 0.1, True), 0.2),
    ),
}
METRICS = {
    "pg_loss": "pg",
    "pg_clipfrac": "clipped",
    "ppo_kl": "old_kl",
    "entropy_loss": "entropy",
    "train_rollout_logprob_abs_diff": "gap",
    "pg_dual_clipfrac": "dual",
    "opsm_masked": "dropped",
    "kl_loss": "kl",
    "kl_cov_loss": "held",
}


def row(sequence, ratio, advantage, *, engine=0.0, d=0.0, logp=-2.0, weight=0.1, entropy=0.5) -> Token:
    """engine: how much likelier it thought the token than the trainer does now. d: logp - ref."""
    return Token(sequence, logp, logp - math.log(ratio), logp + engine, logp - d, advantage, weight, entropy)


# Between the two upper bounds, above both, below, far above with either sign, and inside.
ADVERSARIAL = (
    row(0, 1.24, 1.0, d=0.4, weight=0.07),
    row(0, 1.24, -1.5, d=-0.3),
    row(0, 1.10, 0.7, engine=0.2, d=1.1, weight=0.02),
    row(1, 0.70, -1.2, engine=0.5, d=-3.0),
    row(1, 0.78, 1.3, engine=0.1, d=0.2, weight=0.2),
    row(1, 0.90, -0.4, engine=-0.1, d=-0.7, logp=-0.5),
    row(2, 3.40, -0.9, d=0.05, weight=0.05),
    row(2, 3.40, 0.8, engine=0.9, d=-3.2, logp=-4.0),
    row(2, 0.60, -2.0, engine=0.8, d=2.0),
    row(3, 1.60, -1.1, engine=0.3, d=0.6, entropy=1.7),
    row(4, 1.05, 0.0, engine=2.0, d=-1.0),
    row(5, 1.30, 0.9, engine=-1.5, logp=-0.7),
)


def random_tokens(seed: int) -> list[Token]:
    rng = np.random.default_rng(seed)
    tokens = []
    for sequence in range(6):
        for _ in range(rng.integers(1, 7)):
            gaps = rng.normal(0, 0.5, 3)
            logp = -abs(rng.normal(1.5, 1.0))
            logprobs = (logp, logp + gaps[0], logp + gaps[1], logp + gaps[2])
            tokens.append(Token(sequence, *logprobs, rng.normal(), rng.uniform(0, 0.2), rng.uniform(0, 3)))
    return tokens


def result(loss: PolicyLoss, tokens):
    outputs, inputs = tensors(tokens)
    output = loss(outputs, inputs)
    output.sum.backward()
    return float(output.sum.detach()), outputs, output.metrics


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_value_gradient_and_metrics_are_those_of_the_oracle(name, seed):
    loss, options = VARIANTS[name]
    tokens = random_tokens(seed)
    expected = evaluate(tokens, options)
    total, outputs, metrics = result(loss, tokens)
    assert total == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
    assert outputs.logp_N.grad.tolist() == pytest.approx(slopes(tokens, options), rel=1e-5, abs=1e-8)
    for name_, metric in metrics.items():
        assert float(metric) == pytest.approx(expected[METRICS[name_]], rel=1e-9, abs=1e-9), name_
        assert not metric.requires_grad


logprobs = st.floats(-6, 0)
members = st.tuples(
    logprobs, logprobs, logprobs, logprobs, st.floats(-3, 3), st.floats(0, 1), st.floats(0, 4)
)
batches = st.lists(st.lists(members, min_size=1, max_size=5), min_size=1, max_size=4)


@given(batches, st.sampled_from(sorted(VARIANTS)))
def test_ragged_batches_have_the_value_and_the_metrics_of_the_oracle(batch, name):
    loss, options = VARIANTS[name]
    tokens = [Token(index, *member) for index, sequence in enumerate(batch) for member in sequence]
    expected = evaluate(tokens, options)
    total, _, metrics = result(loss, tokens)
    assert total == pytest.approx(expected["loss"], rel=1e-7, abs=1e-9)
    for metric in ("pg_loss", "kl_loss"):
        if metric in metrics:
            assert float(metrics[metric]) == pytest.approx(expected[METRICS[metric]], rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_on_the_adversarial_batch_each_variant_is_its_own_oracle_and_no_other(name):
    total, outputs, _ = result(VARIANTS[name][0], ADVERSARIAL)
    actual = np.array([total, *outputs.logp_N.grad.tolist()])
    alike = []
    for other, (_, options) in VARIANTS.items():
        expected = np.array([evaluate(ADVERSARIAL, options)["loss"], *slopes(ADVERSARIAL, options)])
        if np.abs(actual - expected).max() < 1e-4:
            alike.append(other)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    assert alike == [name]


def test_only_an_entropy_bonus_pulls_at_the_entropy():
    _, outputs, _ = result(PolicyLoss(), ADVERSARIAL)
    assert outputs.entropy_N.grad is None
    _, outputs, _ = result(PolicyLoss(entropy_coef=0.03), ADVERSARIAL)
    assert outputs.entropy_N.grad.tolist() == pytest.approx([-0.03 * token.weight for token in ADVERSARIAL])


def test_an_entropy_bonus_without_an_entropy_gradient_is_refused():
    outputs, inputs = tensors(ADVERSARIAL)
    blind = outputs._replace(entropy_N=outputs.entropy_N.detach())
    with pytest.raises(ValueError, match="entropy_gradient=True"):
        PolicyLoss(entropy_coef=0.01)(blind, inputs)
    with torch.no_grad():
        still = TokenOutputs(outputs.logp_N.detach(), outputs.entropy_N.detach())
        PolicyLoss(entropy_coef=0.01)(still, inputs)


def test_a_kl_penalty_without_a_reference_is_refused():
    outputs, inputs = tensors(ADVERSARIAL)
    with pytest.raises(ValueError, match="ref_logp_N"):
        PolicyLoss(kl=KlTerm(0.1))(outputs, inputs._replace(ref_logp_N=None))


def assert_descends(objective, base: list[float], outputs) -> None:
    """The gradient is minus that of `objective`, by finite differences."""
    for index, slope in enumerate(outputs.logp_N.grad.tolist()):
        up, down = list(base), list(base)
        up[index] += 1e-6
        down[index] -= 1e-6
        assert slope == pytest.approx(-(objective(up) - objective(down)) / 2e-6, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_advantage_a_sequence_gspo_has_the_gradient_of_the_papers_sequence_form(seed):
    # The paper's objective: the mean over sequences of min(s A, clip(s) A), with a mean over tokens in s.
    rng = np.random.default_rng(seed)
    lengths = (1, 4, 2, 6)
    advantages = (1.0, -1.0, 0.5, -2.0)
    tokens = [
        Token(i, -1.0, -1.0 + rng.normal(0, 0.25), -1.0, -1.0, advantages[i], 1 / (len(lengths) * length))
        for i, length in enumerate(lengths)
        for _ in range(length)
    ]

    def objective(logps: list[float]) -> float:
        total, start = 0.0, 0
        for advantage, length in zip(advantages, lengths, strict=True):
            span = range(start, start + length)
            s = math.prod(math.exp(logps[t] - tokens[t].old) for t in span) ** (1 / length)
            total += min(s * advantage, min(max(s, 0.9), 1.1) * advantage) / len(lengths)
            start += length
        return total

    base = [token.logp for token in tokens]
    total, outputs, _ = result(PolicyLoss(0.1, 0.1, objective="gspo"), tokens)
    assert total == pytest.approx(-objective(base), rel=1e-12)
    assert_descends(objective, base, outputs)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_advantage_a_sequence_gmpo_has_the_gradient_of_the_papers_sequence_form(seed):
    # The paper's objective: the mean over sequences of A x the geometric mean of their bounded ratios.
    rng = np.random.default_rng(seed)
    lengths, advantages = (1, 4, 2, 6), (1.0, -1.0, 0.5, -2.0)
    owners = [i for i, length in enumerate(lengths) for _ in range(length)]
    tokens = [
        Token(i, -1.0, -1.0 + rng.normal(0, 0.5), -1.0, -1.0, advantages[i], 1 / (4 * lengths[i]))
        for i in owners
    ]

    def objective(logps: list[float]) -> float:
        total = 0.0
        for i, advantage in enumerate(advantages):
            ratios = [math.exp(lp - t.old) for lp, t, o in zip(logps, tokens, owners, strict=True) if o == i]
            kept = [min(r, math.exp(0.4)) if advantage > 0 else max(r, math.exp(-0.4)) for r in ratios]
            total += advantage * math.prod(kept) ** (1 / len(kept)) / len(lengths)
        return total

    base = [token.logp for token in tokens]
    total, outputs, _ = result(PolicyLoss(0.4, 0.4, objective="gmpo"), tokens)
    assert total == pytest.approx(-objective(base), rel=1e-12)
    assert_descends(objective, base, outputs)


def test_on_policy_every_objective_has_the_gradient_of_reinforce():
    tokens = [row(i, 1.0, advantage, logp=-0.1 * i - 0.1) for i, advantage in enumerate((1.0, -2.0, 0.5))]
    slopes_of = {
        name: result(PolicyLoss(objective=name), tokens)[1].logp_N.grad.tolist() for name in OBJECTIVES
    }
    for name, slopes_ in slopes_of.items():
        assert slopes_ == pytest.approx(slopes_of["reinforce"]), name


def test_in_gspo_a_token_keeps_the_advantage_that_it_was_given():
    tokens = [row(0, 1.1, 2.0, weight=0.1), row(0, 1.1, 0.0, weight=0.1), row(0, 1.1, 1.0, weight=0.0)]
    _, outputs, _ = result(PolicyLoss(objective="gspo"), tokens)
    assert outputs.logp_N.grad.tolist() == pytest.approx([-0.1 * 2.0 * 1.1, 0.0, 0.0])


def test_sequences_that_are_dropped_leave_the_others_and_their_weights_alone():
    _, plain, _ = result(PolicyLoss(), ADVERSARIAL)
    _, masked, metrics = result(PolicyLoss(opsm_delta=0.1), ADVERSARIAL)
    dropped = [token.sequence in (1, 2, 3) and token.advantage < 0 for token in ADVERSARIAL]
    assert int(metrics["opsm_masked"]) == sum(dropped) == 5
    expected = [
        0.0 if gone else slope for gone, slope in zip(dropped, plain.logp_N.grad.tolist(), strict=True)
    ]
    assert masked.logp_N.grad.tolist() == expected


def test_it_is_the_engines_logprobs_that_tell_how_far_off_a_sequence_is():
    far = [Token(0, -3.0, -3.0, -1.0, -3.0, -1.0, 0.1)]
    near = [Token(0, -3.0, -1.0, -3.0, -3.0, -1.0, 0.1)]
    for tokens, dropped in ((far, 1), (near, 0)):
        _, _, metrics = result(PolicyLoss(opsm_delta=0.5), tokens)
        assert int(metrics["opsm_masked"]) == dropped


def test_dropped_tokens_still_keep_close_to_the_reference():
    loss = PolicyLoss(opsm_delta=0.1, kl=KlTerm(0.3, "k2"), entropy_coef=0.1)
    token = row(0, 1.0, -1.0, engine=1.0, d=0.5)
    _, outputs, _ = result(loss, [token])
    assert outputs.logp_N.grad.tolist() == pytest.approx([0.1 * 0.3 * 0.5])
    assert outputs.entropy_N.grad.tolist() == pytest.approx([-0.1 * 0.1])


def test_factors_on_the_weights_change_their_tokens_only_and_no_metric():
    factors = [0.0 if index % 3 == 0 else 1.0 for index in range(len(ADVERSARIAL))]
    lighter = [t._replace(weight=t.weight * f) for t, f in zip(ADVERSARIAL, factors, strict=True)]
    for loss, _ in VARIANTS.values():
        _, full, before = result(loss, ADVERSARIAL)
        _, part, after = result(loss, lighter)
        expected = full.logp_N.grad * torch.tensor(factors, dtype=torch.float64)
        torch.testing.assert_close(part.logp_N.grad, expected)
        assert before == after


def extremes() -> list[Token]:
    corners = itertools.product((0.0, -1e4), (0.0, -1e4), (0.0, -1e4), (0.0, -1e4), (3.0, -3.0, 0.0))
    return [Token(index // 3, *corner, 0.1) for index, corner in enumerate(corners)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_overflows_where_models_disagree_by_ten_thousand_nats(name, dtype):
    outputs, inputs = tensors(extremes(), dtype)
    output = VARIANTS[name][0](outputs, inputs)
    output.sum.backward()
    assert output.sum.isfinite()
    assert all(metric.isfinite() for metric in output.metrics.values())
    assert outputs.logp_N.grad.isfinite().all()


gaps = st.sampled_from([-1e4, -1e3, -100.0, -20.5, -19.5, -1.0, 0.0])


@given(st.lists(st.tuples(gaps, gaps, gaps, gaps, st.sampled_from([-1e3, 0.0, 1e3])), min_size=1, max_size=9))
def test_no_gradient_points_away_from_a_reference_that_likes_the_token_far_better(rows):
    for kl in (
        KlTerm(0.1, "k2", True),
        *(KlTerm(0.1, kind, flag) for kind in ("k3", "low_var_kl") for flag in (0, 1)),
    ):
        tokens = [Token(index, *row_, 0.1)._replace(advantage=0.0) for index, row_ in enumerate(rows)]
        _, outputs, _ = result(PolicyLoss(kl=kl), tokens)
        for token, slope in zip(tokens, outputs.logp_N.grad.tolist(), strict=True):
            assert math.isfinite(slope)
            if kl.kind != "k2" and token.ref > token.logp:
                assert slope <= 0


@pytest.mark.parametrize("name", VARIANTS)
def test_an_empty_micro_batch_is_worth_nothing(name):
    empty = torch.zeros(0)
    nowhere = torch.zeros(0, dtype=torch.int64)
    outputs = TokenOutputs(torch.zeros(0, requires_grad=True), torch.zeros(0, requires_grad=True))
    output = VARIANTS[name][0](outputs, LossInputs(empty, empty, empty, empty, nowhere, empty))
    output.sum.backward()
    assert float(output.sum.detach()) == 0
    assert all(float(metric) == 0 for metric in output.metrics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_is_promoted_before_anything_is_computed(name, dtype):
    halves, inputs = tensors(ADVERSARIAL, dtype)
    output = VARIANTS[name][0](halves, inputs)
    rounded = [
        token._replace(
            **{
                field: float(torch.tensor(getattr(token, field), dtype=dtype))
                for field in token._fields
                if field != "sequence"
            }
        )
        for token in ADVERSARIAL
    ]
    exact, _, _ = result(VARIANTS[name][0], rounded)
    assert output.sum.dtype == torch.float32
    assert float(output.sum.detach()) == pytest.approx(exact, rel=1e-4)


def test_each_configuration_has_its_metrics_whatever_the_tokens():
    base = {"pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "train_rollout_logprob_abs_diff"}
    for loss, _ in VARIANTS.values():
        names = base.copy()
        names |= {"kl_loss"} if loss.kl else set()
        names |= {"opsm_masked"} if loss.opsm_delta is not None else set()
        names |= {"pg_dual_clipfrac"} if loss.eps_clip_c is not None else set()
        assert result(loss, ADVERSARIAL)[2].keys() == names
        assert result(loss, ADVERSARIAL[:1])[2].keys() == names


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_the_contract(name):
    check_loss(VARIANTS[name][0])
