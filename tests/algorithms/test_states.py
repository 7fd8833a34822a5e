"""GiGPO against loops over turns, against numbers worked out by hand, and the laws of every estimator."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.corrections import Tis
from agentrl.algorithms.estimators import Adjusted
from agentrl.algorithms.filters import has_signal
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.algorithms.rewards import KlPenalty
from agentrl.algorithms.states import StateRelative, state_of
from agentrl.assembly.algorithm import build_estimator, build_is_idle
from agentrl.types import (
    Group,
    History,
    Image,
    Message,
    Restart,
    RolloutId,
    Scores,
    ToolCall,
    Trajectory,
    Verdict,
)
from tests.algorithms.batches import Batch, EpisodeSpec, arrays_of, batch, batches, close, only_on_mask, walk
from tests.algorithms.episodes import TASK, episode, group, of_engine, sample, turn

GIGPO = {
    "plain": StateRelative(),
    "discounted": StateRelative(0.5, 0.7),
    "without std": StateRelative(0.9, 2.0, std_normalization=False),
}
KL = KlPenalty(0.25)


def against(values, mine, by_std):
    """A value against the others of a list, of which it is one."""
    if len(set(values)) < 2:
        return 0.0
    return (mine - fmean(values)) / (stdev(values) + 1e-6 if by_std else 1.0)


def return_from(spec_rewards, k, gamma):
    return sum(gamma ** (j - k) * reward for j, reward in enumerate(spec_rewards) if j >= k)


def naive(drawn: Batch, estimator: StateRelative):
    """By sample and position: the advantage of each token, with nothing but loops."""
    turns = {}
    for g, played in enumerate(drawn.groups):
        for e, verdict in zip(played.episodes, played.verdicts, strict=True):
            flat = [t for trajectory in e.trajectories for t in trajectory.turns]
            rewards = [0.0] * len(flat)
            for k, reward in enumerate(verdict.turn_rewards):
                rewards[k] += reward or 0.0
            rewards[-1] += verdict.total - sum(rewards)
            for k, t in enumerate(flat):
                state = g, t.observation[0].text
                turns[e.id, k] = (state, return_from(rewards, k, estimator.gamma), verdict.total, g)
    advantages = {}
    for id, tokens in walk(drawn.samples).items():
        for token in tokens:
            state, own, total, g = turns[id.episode, token.turn]
            totals = [v.total for v in drawn.groups[g].verdicts]
            same = [other for where, other, _, _ in turns.values() if where == state]
            outcome = against(totals, total, estimator.std_normalization)
            step = against(same, own, estimator.std_normalization)
            advantages[token.sample, token.position] = outcome + estimator.weight * step
    return [
        [advantages.get((i, t), 0.0) for t in range(len(s.token_ids))] for i, s in enumerate(drawn.samples)
    ]


@given(drawn=batches())
@pytest.mark.parametrize("name", GIGPO)
def test_advantages_agree_with_loops_over_turns(name, drawn):
    credit = drawn.credit(GIGPO[name])
    assert close(credit.advantages, naive(drawn, GIGPO[name]), 1e-4)
    assert all(only_on_mask(drawn.samples, credit.advantages))


# Three siblings with one token in each turn. Rollout 0: states s, a; rewards 0, 1. Rollout 1: s, b, s; 0, 0,
# 0. Rollout 2: s, a; 0, 0. With gamma 0.5 the returns are
#     s: 0.5 (0, turn 0), 0 (1, turn 0), 0 (1, turn 2), 0 (2, turn 0)   mean 1/8, std of a sample 1/4
#     a: 1 (0, turn 1), 0 (2, turn 1)                                    mean 1/2, std 1/sqrt 2
#     b: 0 (1, turn 1), alone                                            0
# and the totals 1, 0, 0 have the mean 1/3 and the std 1/sqrt 3.
ROLLOUTS = batch(
    [
        EpisodeSpec([1, 1], 1.0, [0.0, 1.0], states="sa"),
        EpisodeSpec([1, 1, 1], 0.0, states="sbs"),
        EpisodeSpec([1, 1], 0.0, states="sa"),
    ]
)
BY_HAND = {
    # mean_norm: the episode's 2/3, -1/3, -1/3, and the turn's.
    False: [[2 / 3 + 3 / 8, 2 / 3 + 1 / 2], [-1 / 3 - 1 / 8, -1 / 3, -1 / 3 - 1 / 8], [-11 / 24, -5 / 6]],
    # mean_std_norm: divided by 1/sqrt 3, and by 1/4 or 1/sqrt 2.
    True: [
        [2 / 3**0.5 + 1.5, 2 / 3**0.5 + 0.5**0.5],
        [-(3**-0.5) - 0.5, -(3**-0.5), -(3**-0.5) - 0.5],
        [-(3**-0.5) - 0.5, -(3**-0.5) - 0.5**0.5],
    ],
}


@pytest.mark.parametrize("by_std", BY_HAND)
def test_a_small_group_worked_out_by_hand(by_std):
    credit = ROLLOUTS.credit(StateRelative(0.5, 1.0, by_std))
    own = [a[s.loss_mask].tolist() for a, s in zip(credit.advantages, ROLLOUTS.samples, strict=True)]
    for row, expected in zip(own, BY_HAND[by_std], strict=True):
        assert row == pytest.approx(expected, abs=2e-5)
    assert credit.metrics == pytest.approx({"shared_states": 6 / 7})


@pytest.mark.parametrize("kl", [None, KL])
@pytest.mark.parametrize("name", GIGPO)
def test_the_contract_of_estimators_holds(name, kl):
    check_estimator(replace(GIGPO[name], kl=kl))
    check_estimator(Adjusted(replace(GIGPO[name], kl=kl), 0.5, True, correction=Tis()))


@given(drawn=batches(gap=1e4))
def test_no_gap_however_huge_gives_a_number_that_is_none(drawn):
    credit = drawn.credit(Adjusted(replace(GIGPO["discounted"], kl=KL), 1.0, correction=Tis()))
    assert all(only_on_mask(drawn.samples, credit.advantages))


@given(drawn=batches())
def test_a_penalty_is_taken_from_the_token_it_is_on_and_those_before(drawn):
    plain, with_kl = (drawn.credit(replace(GIGPO["plain"], kl=kl)).advantages for kl in (None, KL))
    for tokens in walk(drawn.samples).values():
        gaps = [
            float(drawn.scores.proximal[t.sample][t.position]) - float(drawn.scores.ref[t.sample][t.position])
            for t in tokens
        ]
        for n, t in enumerate(tokens):
            lost = float(plain[t.sample][t.position] - with_kl[t.sample][t.position])
            assert lost == pytest.approx(0.25 * sum(gaps[n:]), abs=1e-4)


def changed(drawn: Batch, change) -> Batch:
    """The batch with changed totals; rewards of turns are dropped."""
    groups = [
        replace(g, verdicts=tuple(replace(v, total=change(v.total), turn_rewards=()) for v in g.verdicts))
        for g in drawn.groups
    ]
    return drawn._replace(groups=groups)


@given(drawn=batches())
def test_rewards_may_be_shifted_and_stretched(drawn):
    """Both hold where all of the reward comes at the end and is not discounted."""
    plain = changed(drawn, lambda total: total)
    for estimator, by_std in ((StateRelative(), True), (StateRelative(1.0, 0.5, False), False)):
        base = plain.credit(estimator).advantages
        assert close(changed(drawn, lambda total: total + 3.0).credit(estimator).advantages, base, 1e-3)
        stretched = changed(drawn, lambda total: 4.0 * total).credit(estimator).advantages
        assert close(stretched, [a if by_std else 4.0 * a for a in base], 1e-3)


@pytest.mark.parametrize("name", GIGPO)
def test_a_history_that_was_rewritten_changes_no_advantage(name):
    per_token = []
    for split in (0, 1, 2):
        specs = [
            EpisodeSpec([2, 1, 1], 1.0, [0.5], split, states="sab"),
            EpisodeSpec([1, 2], 3.0, states="sa"),
            EpisodeSpec([1, 1], 0.0, states="ss"),
        ]
        drawn = batch(specs)
        masks = np.concatenate([s.loss_mask for s in drawn.samples])
        per_token.append(np.concatenate(drawn.credit(GIGPO[name]).advantages)[masks].tolist())
    assert per_token[0] == per_token[1] == per_token[2]


@given(drawn=batches())
def test_states_of_other_groups_are_others(drawn):
    together = drawn.credit(GIGPO["discounted"]).advantages
    alone = [
        array
        for g, own in zip(drawn.groups, drawn.samples_by_group, strict=True)
        for array in arrays_of(GIGPO["discounted"], [g], own, of_engine(own)).advantages
    ]
    assert close(together, alone)


def test_equal_totals_with_a_signal_in_their_turns_are_learned_from():
    drawn = batch(
        [EpisodeSpec([1, 1], 1.0, [1.0], states="sa"), EpisodeSpec([1, 1], 1.0, [0.0, 1.0], states="sb")]
    )
    assert not has_signal(drawn.groups[0])
    values = drawn.credit(StateRelative(0.5, 1.0, False)).advantages
    assert [a[1::2].tolist() for a in values] == [[0.25, 0.0], [-0.25, 0.0]]
    assert not build_is_idle(AlgorithmConfig(advantage_estimator="gigpo"))(drawn.groups[0])
    # Without a discount both returns are 1, and nothing is left, exactly.
    assert not any(np.any(a) for a in drawn.credit(StateRelative()).advantages)


def test_each_setting_reaches_the_estimator():
    settings = {"gamma": 0.5, "gigpo_step_advantage_weight": 0.25, "scale_rewards": "none", "kl_coef": 0.1}
    built = build_estimator(AlgorithmConfig(advantage_estimator="gigpo", **settings))
    assert built.estimator == StateRelative(0.5, 0.25, False, KlPenalty(0.1))
    assert build_estimator(AlgorithmConfig(advantage_estimator="gigpo")).estimator == StateRelative()


def test_where_no_state_is_shared_it_is_grpo():
    drawn = batch([EpisodeSpec([1, 2], 1.0, states="ab"), EpisodeSpec([2], 0.0, states="c")])
    credit, grpo = drawn.credit(GIGPO["discounted"]), drawn.credit(GroupRelative())
    assert close(credit.advantages, grpo.advantages)
    assert credit.metrics == {"shared_states": 0.0}


def test_what_a_frozen_agent_saw_and_achieved_is_not_compared_with():
    def played(id, *, frozen, totals):
        turns = {name: (replace(turn([1], [2]), step=k),) for k, name in enumerate(("one", "two"))}
        parts = tuple(Trajectory(t, agent=name, trainable=name not in frozen) for name, t in turns.items())
        made = replace(episode(id, [turn([1], [2])]), agents=("one", "two"), trajectories=())
        made = replace(made, frozen_agents=frozen, trajectories=parts)
        return made, [Verdict(id, "s", total, agent=name) for name, total in zip(turns, totals, strict=True)]

    both = [played("a", frozen=("two",), totals=(1, 50)), played("b", frozen=("two",), totals=(0, 70))]
    own = Group("g", TASK, 0, tuple(e for e, _ in both), tuple(v for _, verdicts in both for v in verdicts))
    samples = [replace(sample(id, [0, 1]), rollout_id=RolloutId(id, "one")) for id in "ab"]
    values = arrays_of(StateRelative(1.0, 1.0, False), [own], samples, of_engine(samples)).advantages
    # All turns saw the same, those of the frozen agent, too: the turn's advantage is the episode's once more.
    assert [a.tolist() for a in values] == [[0, 1], [0, -1]]


def test_a_state_is_what_was_read_and_not_the_ids_of_calls():
    seen = Message("tool", "12 C", name="weather", tool_call_id="x1")
    assert state_of((seen,)) == state_of((replace(seen, tool_call_id="y2"),))
    assert state_of((seen,)) != state_of((replace(seen, name="time"),))
    assert state_of((seen,)) != state_of((replace(seen, content="13 C"),))
    assert state_of((seen, seen)) != state_of((seen,))
    images = [Message("user", (Image.of(data),)) for data in (b"1", b"2")]
    assert state_of((images[0],)) != state_of((images[1],))
    calls = [Message("assistant", "", tool_calls=(ToolCall("go", {"to": n}),)) for n in (1, 2)]
    assert state_of((calls[0],)) != state_of((calls[1],))
    assert state_of(History((seen,), Restart.COMPACTED)) == state_of((seen,))
    assert len({state_of((m,)) for m in (seen, *images, *calls)}) == 5


def test_bad_input_is_one_sentence():
    with pytest.raises(ValueError, match="gamma must be between 0 and 1"):
        StateRelative(1.5)
    stranger = sample("x", [0, 1])
    with pytest.raises(ValueError, match=r"no group: .*'x'"):
        arrays_of(StateRelative(), [group("a", [1, 0])], [stranger], of_engine([stranger]))
    later = replace(sample("a.0", [0, 1]), turns=np.array([0, 5], np.int32))
    with pytest.raises(ValueError, match=r"a\.0.* has 1 turns"):
        arrays_of(StateRelative(), [group("a", [1, 0])], [later], of_engine([later]))
    drawn = batch([EpisodeSpec([1], 1.0), EpisodeSpec([1])])
    with pytest.raises(ValueError, match="reference model"):
        arrays_of(StateRelative(kl=KL), drawn.groups, drawn.samples, Scores(drawn.scores.proximal))
