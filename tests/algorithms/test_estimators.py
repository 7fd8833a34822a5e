import math
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given

from agentrl.algorithms.baselines import dr_grpo, grpo, grpo_passk, maxrl, rloo
from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.corrections import IcePop, Mis, Tis
from agentrl.algorithms.estimators import Adjusted, Gae, ReinforcePlusPlus
from agentrl.algorithms.group_relative import GroupRelative, LengthWeighted, OptimalToken, TurnRelative
from agentrl.algorithms.rewards import KlPenalty
from agentrl.types import Scores
from tests.algorithms.batches import (
    Batch,
    EpisodeSpec,
    arrays_of,
    batch,
    batches,
    by_sample,
    close,
    only_on_mask,
    walk,
)
from tests.algorithms.episodes import group, of_engine, sample

KL = KlPenalty(0.25)
ESTIMATORS = {
    "grpo": GroupRelative(),
    "dr_grpo": GroupRelative(dr_grpo),
    "rloo": GroupRelative(rloo),
    "maxrl": GroupRelative(maxrl),
    "grpo_passk": GroupRelative(grpo_passk),
    "gpg": GroupRelative(dr_grpo, scale="signal"),
    "batch": GroupRelative(dr_grpo, scale="batch"),
    "opo": LengthWeighted(),
    "otb": OptimalToken(),
    "turns": TurnRelative(),
    "discounted turns": TurnRelative(0.5),
    "reinforce_plus_plus": ReinforcePlusPlus(),
    "discounted reinforce_plus_plus": ReinforcePlusPlus(0.5),
    "reinforce_plus_plus by turns": ReinforcePlusPlus(0.5, "turn"),
    "ppo": Gae(0.9, 0.8),
    "ppo by turns": Gae(0.9, 0.8, "turn"),
}
WITH_KL = {f"{name} with kl": replace(estimator, kl=KL) for name, estimator in ESTIMATORS.items()}
ESTIMATORS["ppo whitened"] = Adjusted(ESTIMATORS["ppo"], normalize_advantages=True)
ESTIMATORS["dr_grpo whitened"] = Adjusted(GroupRelative(dr_grpo), normalize_advantages=True)
ESTIMATORS["reinforce_plus_plus whitened"] = Adjusted(ReinforcePlusPlus(), normalize_advantages=True)


def whitened(values):
    mean, spread = (fmean(values), pstdev(values)) if values else (0.0, 0.0)
    return [(v - mean) / (spread + 1e-8) for v in values]


def scores_of(drawn: Batch, arrays, tokens):
    return [float(arrays[token.sample][token.position]) for token in tokens]


def rewards_of(verdict, tokens, kl):
    """The rewards of the tokens of one episode."""
    rewards = [-x for x in kl]
    rest = verdict.total
    for turn, reward in enumerate(verdict.turn_rewards):
        if reward is not None and tokens:
            before = [n for n, token in enumerate(tokens) if token.turn <= turn]
            rewards[before[-1] if before else 0] += reward
            rest -= reward
    if tokens:
        rewards[-1] += rest
    return rewards


def backwards(tokens, rewards, values, shares):
    """The loop of GAE; without values and with lambda 1 it is the loop of returns."""
    gamma, lambd, by_turn = shares
    advantages, later = [], 0.0
    for n in reversed(range(len(tokens))):
        step, trust, following = 0.0, 0.0, 0.0
        if n + 1 < len(tokens):
            step, trust = (1.0, 1.0) if by_turn and tokens[n].turn == tokens[n + 1].turn else (gamma, lambd)
            following = values[n + 1]
        later = rewards[n] + step * following - values[n] + step * trust * later
        advantages.append(later)
    return advantages[::-1]


def outcome(name, mine, totals):
    """The advantage of an episode by totals alone."""
    mean = fmean(totals)
    if len(set(totals)) == 1:
        return 0.0
    match name:
        case "grpo":
            return (mine - mean) / (stdev(totals) + 1e-6)
        case "rloo":
            return (mine - mean) * len(totals) / (len(totals) - 1)
        case "maxrl":
            return (mine - mean) / mean
        case "grpo_passk":
            second, best = sorted(totals)[-2:]
            return (best - second) / (stdev(totals) + 1e-6) if mine == best else 0.0
    return mine - mean


def turn_returns(group, gamma):
    returns = []
    for episode, verdict in zip(group.episodes, group.verdicts, strict=True):
        rewards = [0.0] * len(episode.turns)
        for k, reward in enumerate(verdict.turn_rewards):
            rewards[k] += reward or 0.0
        rewards[-1] += verdict.total - sum(rewards)
        returns.append(
            [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
        )
    return returns


def against_others(returns, i, k):
    others = [r for j, r in enumerate(returns) if j != i]
    reached = [r[k] for r in others if len(r) > k] or [r[0] for r in others]
    return returns[i][k] - fmean(reached) if reached else 0.0


def against_energy(drawn: Batch, group, i, written):
    """arXiv 2602.07078: returns less the siblings' mean, weighted by the energy so far; alone, nothing."""
    returns, energies = [], []
    for episode, verdict in zip(group.episodes, group.verdicts, strict=True):
        tokens = written.get((episode.id, "agent"), [])
        rewards = rewards_of(verdict, tokens, [0.0] * len(tokens))
        returns.append([sum(rewards[n:]) for n in range(len(tokens))])
        pi = [math.exp(min(x, 0.0)) for x in scores_of(drawn, drawn.scores.proximal, tokens)]
        squares = scores_of(drawn, drawn.scores.sum_pi_squared, tokens)
        each = [max(1 - 2 * p + s, 0.0) for p, s in zip(pi, squares, strict=True)]
        energies.append([sum(each[: n + 1]) for n in range(len(tokens))])
    advantages = []
    for t, own in enumerate(returns[i]):
        reached = [(w[t], g[t]) for w, g in zip(energies, returns, strict=True) if len(g) > t]
        total = sum(w for w, _ in reached)
        longest = max(returns, key=len)[t]
        mean = sum(w * g for w, g in reached) / total if total else longest
        advantages.append(own - (mean if len(reached) > 1 else 0.0))
    return advantages


def rescaled(plain_name, drawn: Batch, advantages, gone):
    """What some names multiply the advantages of a whole batch by; gone: penalties, which stay."""
    if plain_name == "batch":
        everyone = [v.total for g in drawn.groups for v in g.verdicts]
        spread = stdev(everyone) + 1e-6 if len(set(everyone)) > 1 else 1.0
        advantages = [(a + k) / spread - k for a, k in zip(advantages, gone, strict=True)]
    if plain_name == "gpg":
        different = [g for g in drawn.groups if len({v.total for v in g.verdicts}) > 1]
        scale = sum(len(g.verdicts) for g in drawn.groups) / max(sum(len(g.verdicts) for g in different), 1)
        advantages = [(a + k) * scale - k for a, k in zip(advantages, gone, strict=True)]
    return advantages


def naive_advantages(name, drawn: Batch):
    """The advantages of an estimator by its name, as one list for each sample, with nothing but loops."""
    plain_name = name.removesuffix(" with kl").removesuffix(" whitened")
    places = {(e.id, "agent"): (g, i) for g in drawn.groups for i, e in enumerate(g.episodes)}
    order, advantages, gone = [], [], []
    written = walk(drawn.samples)
    for id, tokens in written.items():
        siblings, i = places[id]
        old, ref = scores_of(drawn, drawn.scores.proximal, tokens), scores_of(drawn, drawn.scores.ref, tokens)
        kl = [0.25 * (a - b) if name.endswith(" with kl") else 0.0 for a, b in zip(old, ref, strict=True)]
        penalties = [sum(kl[n:]) for n in range(len(tokens))]
        totals = [v.total for v in siblings.verdicts]
        rewards = rewards_of(siblings.verdicts[i], tokens, kl)
        order += tokens
        gone += penalties
        if plain_name.startswith("ppo"):
            values = scores_of(drawn, drawn.scores.values, tokens)
            advantages += backwards(tokens, rewards, values, (0.9, 0.8, "turns" in plain_name))
        elif "reinforce_plus_plus" in plain_name:
            gamma = 0.5 if "discounted" in plain_name or "turns" in plain_name else 1.0
            advantages += backwards(tokens, rewards, [0.0] * len(tokens), (gamma, 1.0, "turns" in plain_name))
        elif "turns" in plain_name:
            returns = turn_returns(siblings, 0.5 if "discounted" in plain_name else 1.0)
            advantages += [
                against_others(returns, i, t.turn) - k for t, k in zip(tokens, penalties, strict=True)
            ]
        elif plain_name == "otb":
            advantages += [
                a - k for a, k in zip(against_energy(drawn, siblings, i, written), penalties, strict=True)
            ]
        elif plain_name == "opo":
            lengths = [len(written.get((e.id, "agent"), ())) for e in siblings.episodes]
            weighted = sum(n * r for n, r in zip(lengths, totals, strict=True)) / max(sum(lengths), 1)
            is_alike = len(set(totals)) == 1
            advantages += [(0.0 if is_alike else totals[i] - weighted) - k for k in penalties]
        else:
            advantages += [outcome(plain_name, totals[i], totals) - k for k in penalties]
    advantages = rescaled(plain_name, drawn, advantages, gone)
    if "whitened" in name:
        advantages = whitened(advantages)
    return by_sample(
        drawn.samples, {(t.sample, t.position): a for t, a in zip(order, advantages, strict=True)}
    )


ADVERSARIAL = batch(
    [
        EpisodeSpec([2, 1, 2], 2.0, [0.5, None, 0.25], split=1),
        EpisodeSpec([1], 0.0),
        EpisodeSpec([1, 0, 3], 1.0, [None, 0.75]),
    ],
    [EpisodeSpec([0, 2], 1.0, [1.0]), EpisodeSpec([3, 1], 3.0, split=1)],
    [
        EpisodeSpec([2], 1.0),
        EpisodeSpec([1, 1], 1.0),
        EpisodeSpec([0], 0.0),
        EpisodeSpec([2, 2, 2], 0.0, [1.0, -2.0]),
    ],
    [EpisodeSpec([1], 0.5), EpisodeSpec([2, 1], 0.5)],
)


@given(drawn=batches())
def test_advantages_agree_with_loops_over_tokens(drawn):
    for name, estimator in (ESTIMATORS | WITH_KL).items():
        credit = drawn.credit(estimator)
        assert close(credit.advantages, naive_advantages(name, drawn), 1e-4), name
        assert all(only_on_mask(drawn.samples, credit.advantages)), name


def test_each_name_is_its_own_estimator_and_no_other():
    everyone = ESTIMATORS | WITH_KL
    naive = {name: np.concatenate(naive_advantages(name, ADVERSARIAL)) for name in everyone}
    estimated = {name: np.concatenate(ADVERSARIAL.credit(e).advantages) for name, e in everyone.items()}
    same = {
        (name, other)
        for name, other in product(everyone, everyone)
        if np.allclose(estimated[name], naive[other], rtol=1e-3, atol=1e-3)
    }
    assert same == {(name, name) for name in everyone}


@given(batches())
def test_a_critics_target_is_its_value_plus_the_advantage(drawn):
    credit = drawn.credit(ESTIMATORS["ppo"])
    advantages = naive_advantages("ppo", drawn)
    expected = [
        [a + float(v) if bit else 0.0 for a, v, bit in zip(*row, strict=True)]
        for row in zip(advantages, drawn.scores.values, [s.loss_mask for s in drawn.samples], strict=True)
    ]
    assert close(credit.returns, expected)
    assert close(drawn.credit(ESTIMATORS["ppo whitened"]).returns, expected)


@pytest.mark.parametrize("name", [*ESTIMATORS, *WITH_KL])
def test_every_estimator_keeps_the_contract(name):
    check_estimator((ESTIMATORS | WITH_KL)[name])


@pytest.mark.parametrize("correction", [Tis(), IcePop(), Mis("sequence", "mask", veto=1e-4)], ids=repr)
def test_with_everything_on_top_the_contract_holds(correction):
    for name in ("grpo", "turns", "reinforce_plus_plus", "ppo"):
        estimator = replace(ESTIMATORS[name], kl=KL)
        check_estimator(Adjusted(estimator, 0.5, True, correction=correction))


@given(drawn=batches(gap=1e4))
def test_no_gap_however_huge_gives_a_number_that_is_none(drawn):
    for name, estimator in (ESTIMATORS | WITH_KL).items():
        credit = drawn.credit(Adjusted(estimator, 1.0, correction=Tis()))
        assert all(only_on_mask(drawn.samples, credit.advantages)), name
        assert all(np.isfinite(list(credit.metrics.values()))), name


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "grpo_passk", "gpg", "opo", "turns"])
def test_equal_rewards_give_exactly_nothing(name):
    drawn = batch(
        [EpisodeSpec([2, 1], 0.1), EpisodeSpec([1], 0.1), EpisodeSpec([1, 1, 1], 0.1)],
        [EpisodeSpec([2], 5.0)],
    )
    assert not any(np.any(a) for a in drawn.credit(ESTIMATORS[name]).advantages)


def numbered(drawn: Batch, factor):
    """Scores that go by where a token is in its episode, not in its sample."""
    arrays = [np.zeros(len(s), np.float32) for s in drawn.samples]
    for tokens in walk(drawn.samples).values():
        for n, token in enumerate(tokens):
            arrays[token.sample][token.position] = -factor * (n % 3)
    return tuple(arrays)


@pytest.mark.parametrize("name", [*ESTIMATORS, *WITH_KL])
def test_splitting_an_episode_changes_no_advantage(name):
    per_token = []
    for split in (0, 1):
        drawn = batch([EpisodeSpec([2, 1, 1], 1.0, [0.5], split), EpisodeSpec([1, 2], 3.0)])
        squares = tuple(np.full(len(s), 0.9, np.float32) for s in drawn.samples)
        scores = Scores(*(numbered(drawn, k) for k in (1, 2, 3, 4)), sum_pi_squared=squares)
        credit = drawn._replace(scores=scores).credit((ESTIMATORS | WITH_KL)[name])
        masks = np.concatenate([s.loss_mask for s in drawn.samples])
        per_token.append(np.concatenate(credit.advantages)[masks].tolist())
    assert per_token[0] == per_token[1]


def test_baselines_count_episodes_whatever_became_of_them():
    # Episode 0 became two samples, episode 2 none: the mean of 3, 0, 0 is still 1.
    groups = [group("a", [3, 0, 0])]
    samples = [sample("a.0", [0, 1]), sample("a.0", [0, 1, 1]), sample("a.1", [0, 1])]
    credit = arrays_of(GroupRelative(dr_grpo), groups, samples, of_engine(samples))
    assert [a.tolist() for a in credit.advantages] == [[0, 2], [0, 2, 2], [0, -1]]
    by_turn = arrays_of(TurnRelative(), groups, samples, of_engine(samples))
    assert [a.tolist() for a in by_turn.advantages] == [[0, 3], [0, 3, 3], [0, -1.5]]


def test_standard_deviation_divides_only_where_configured():
    groups = [group("a", [2, 0])]
    samples = [sample("a.0", [0, 1]), sample("a.1", [0, 1])]
    divided = arrays_of(GroupRelative(), groups, samples, of_engine(samples)).advantages
    plain = GroupRelative(partial(grpo, std_normalization=False))
    plain = arrays_of(plain, groups, samples, of_engine(samples)).advantages
    assert [a[1] for a in divided] == pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)
    assert [a[1] for a in plain] == [1, -1]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sample_from_nowhere_is_refused(name):
    stranger = sample("x", [0, 1])
    zeros = (np.zeros(2, np.float32),)
    scores = replace(of_engine([stranger]), values=zeros, sum_pi_squared=zeros)
    with pytest.raises(ValueError, match=r"no group: .*'x'"):
        arrays_of(ESTIMATORS[name], [group("a", [1, 0])], [stranger], scores)


def test_samples_of_turns_that_were_not_played_are_refused():
    later = replace(sample("a.0", [0, 1]), turns=np.array([0, 5], np.int32))
    with pytest.raises(ValueError, match=r"a\.0.* has 1 turns"):
        arrays_of(TurnRelative(), [group("a", [1, 0])], [later], of_engine([later]))


@pytest.mark.parametrize(
    ("estimator", "sentence"),
    [
        (Gae(), "needs the values of a critic"),
        (GroupRelative(kl=KL), "needs the logprobs of a reference model"),
        (Gae(kl=KL), "needs the values of a critic"),
        (Adjusted(GroupRelative(), opd_kl_coef=1.0), "needs the logprobs of a teacher"),
    ],
)
def test_missing_scores_are_named(estimator, sentence):
    drawn = batch([EpisodeSpec([1], 1.0), EpisodeSpec([1])])
    with pytest.raises(ValueError, match=sentence):
        arrays_of(estimator, drawn.groups, drawn.samples, of_engine(drawn.samples))


def test_a_gamma_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match="gamma must be between 0 and 1"):
        TurnRelative(1.5)


@given(batches())
def test_distillation_pulls_towards_the_teacher_before_whitening(drawn):
    advantages = drawn.credit(GroupRelative(dr_grpo)).advantages
    gaps, pulled = {}, {}
    for tokens in walk(drawn.samples).values():
        for t in tokens:
            position = t.sample, t.position
            gaps[position] = float(drawn.scores.proximal[t.sample][t.position]) - float(
                drawn.scores.teacher[t.sample][t.position]
            )
            pulled[position] = float(advantages[t.sample][t.position]) - 0.5 * gaps[position]
    credit = drawn.credit(Adjusted(GroupRelative(dr_grpo), opd_kl_coef=0.5))
    assert close(credit.advantages, by_sample(drawn.samples, pulled))
    assert credit.metrics == pytest.approx({"opd_kl": fmean(gaps.values()) if gaps else 0.0})
    both = drawn.credit(Adjusted(GroupRelative(dr_grpo), opd_kl_coef=0.5, normalize_advantages=True))
    scaled = dict(zip(pulled, whitened(list(pulled.values())), strict=True))
    assert close(both.advantages, by_sample(drawn.samples, scaled), 1e-3)


@given(batches())
def test_a_correction_multiplies_advantages(drawn):
    correction = Mis("token", "mask")
    plain, corrected = (drawn.credit(Adjusted(GroupRelative(), correction=c)) for c in (None, correction))
    factors_N, metrics, _ = correction(drawn.tokens, drawn.token_scores)
    expected = drawn.tokens.gather(plain.advantages, "advantages") * factors_N
    assert close(corrected.advantages, drawn.tokens.scatter(expected))
    assert corrected.metrics == metrics


def test_with_nothing_on_top_advantages_are_the_estimators_own():
    plain, adjusted = ADVERSARIAL.credit(Gae(kl=KL)), ADVERSARIAL.credit(Adjusted(Gae(kl=KL)))
    for field in ("advantages", "returns"):
        pairs = zip(getattr(plain, field), getattr(adjusted, field), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    assert adjusted.metrics == plain.metrics
    assert set(plain.metrics) == {"ref_kl"}
