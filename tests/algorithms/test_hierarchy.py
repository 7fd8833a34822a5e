"""Roles of several agents, and rewards that include those of other roles, against loops over rollouts."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algorithms.baselines import rloo
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.controls import RoleBaselines
from agentrl.algorithms.estimators import Gae, ReinforcePlusPlus
from agentrl.algorithms.filters import has_signal
from agentrl.algorithms.group_relative import (
    GreedyBaseline,
    GroupRelative,
    LengthWeighted,
    OptimalToken,
    TurnRelative,
)
from agentrl.algorithms.hierarchy import Hierarchical, Hierarchy, role_of
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.states import StateRelative
from agentrl.algorithms.tokens import Tokens
from agentrl.assembly.algorithm import build_estimator, build_is_idle, check_agents
from agentrl.errors import ConfigError
from agentrl.types import Episode, Group, Restart, Scores, Trajectory, Verdict
from tests.algorithms.batches import arrays_of
from tests.algorithms.episodes import TASK, episode, of_engine, turn

AGENTS = ("planner", "searcher_0", "searcher_1", "searcher_2")
ROLES = {"searcher_*": "searcher"}
SHARES = {"searcher": {"planner": 0.5}, "planner": {"searcher": -0.25}}


def played(id, rewards, *, frozen=(), split=False) -> tuple[Episode, list[Verdict]]:
    """An episode. rewards: of the agents that took two turns each; all others took none, and got 9."""
    trajectories, k = [], 0
    for agent in [name for name in AGENTS if name in rewards]:
        turns = [replace(turn([1], [2, 3]), step=k + n) for n in range(2)]
        parts = [turns[:1], turns[1:]] if split else [turns]
        for n, part in enumerate(parts):
            parent, reason = (len(trajectories) - 1, Restart.REWRITTEN) if n else (None, None)
            trajectories.append(Trajectory(tuple(part), parent, reason, agent, agent not in frozen))
        k += 2
    made = replace(episode(id, [turn([1], [2])]), agents=AGENTS, trajectories=())
    made = replace(made, frozen_agents=tuple(frozen), trajectories=tuple(trajectories))
    return made, [Verdict(id, "s", rewards.get(agent, 9.0), agent=agent) for agent in AGENTS]


def grouped(id, *episodes, **how) -> Group:
    both = [played(f"{id}.{i}", rewards, **how) for i, rewards in enumerate(episodes)]
    verdicts = tuple(verdict for _, own in both for verdict in own)
    return Group(id, TASK, 0, tuple(e for e, _ in both), verdicts)


def samples_in(groups):
    return [s for g in groups for e in g.episodes for s in samples_of(e)]


def credited(estimator, groups):
    """The advantage of each rollout by episode and agent; all of its tokens have the same."""
    samples = samples_in(groups)
    values = {}
    for s, array in zip(
        samples, arrays_of(estimator, groups, samples, of_engine(samples)).advantages, strict=True
    ):
        values.setdefault(tuple(s.rollout_id), set()).update(array[s.loss_mask].tolist())
    assert all(len(own) == 1 for own in values.values())
    return {id: own.pop() for id, own in values.items()}


def role_in(roles, agent):
    return next((role for name, role in roles.items() if fnmatchcase(agent, name)), agent)


def rewards_compared(e, verdicts, roles, shares):
    """Role and reward, shares included, of each agent of an episode that took a turn."""
    acted = {t.agent for t in e.trajectories if t.turns}
    own = {v.agent: v.total for v in verdicts if v.episode_id == e.id and v.agent in acted}
    for agent, reward in own.items():
        role, added = role_in(roles, agent), 0.0
        for other, share in shares.get(role, {}).items():
            others = [r for a, r in own.items() if role_in(roles, a) == other]
            added += share * sum(others) / len(others) if others else 0.0
        yield (e.id, agent), (role, reward + added)


def naive(groups, roles, shares):
    """Each reward against all rollouts of the role in the group: loops over rollouts."""
    values = {}
    for g in groups:
        compared = {}
        for e in g.episodes:
            compared |= rewards_compared(e, g.verdicts, roles, shares)
        for id, (role, total) in compared.items():
            siblings = [t for r, t in compared.values() if r == role]
            is_alike = max(siblings) - min(siblings) < 1e-12
            values[id] = 0.0 if is_alike else (total - fmean(siblings)) / (stdev(siblings) + 1e-6)
    return values


def rewards_of_episodes():
    reward = st.floats(-2, 2).map(lambda r: round(r, 2))
    subs = st.dictionaries(st.sampled_from(AGENTS[1:]), reward)
    return st.builds(lambda planner, subs: {"planner": planner, **subs}, reward, subs)


@given(st.lists(st.lists(rewards_of_episodes(), min_size=1, max_size=4), min_size=1, max_size=3))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("roles", [{}, ROLES])
@pytest.mark.parametrize("shares", [{}, SHARES])
def test_credit_agrees_with_loops_over_rollouts(roles, shares, split, drawn):
    if shares and not roles:
        shares = {"searcher_0": {"planner": 2.0}}
    groups = [grouped(f"g{n}", *episodes, split=split) for n, episodes in enumerate(drawn)]
    own = credited(Hierarchical(GroupRelative(), Hierarchy(roles, shares)), groups)
    assert own == pytest.approx(naive(groups, roles, shares), abs=1e-3, rel=1e-3)


@given(st.lists(st.lists(rewards_of_episodes(), min_size=1, max_size=4), min_size=1, max_size=3))
def test_without_a_hierarchy_too_only_those_who_acted_are_compared(drawn):
    groups = [grouped(f"g{n}", *episodes) for n, episodes in enumerate(drawn)]
    assert credited(GroupRelative(), groups) == pytest.approx(naive(groups, {}, {}), abs=1e-3, rel=1e-3)


def test_a_small_group_worked_out_by_hand():
    """A planner that succeeds once, with two searchers, with one, and with none."""
    groups = [
        grouped(
            "g",
            {"planner": 1.0, "searcher_0": 0.5, "searcher_1": 0.0},
            {"planner": 0.0, "searcher_2": 1.0},
            {"planner": 0.0},
        )
    ]
    plain = GroupRelative(lambda rewards: np.asarray(rewards) - np.mean(rewards))
    own = credited(Hierarchical(plain, Hierarchy(ROLES, {"searcher": {"planner": 0.5}})), groups)
    # Searchers: 0.5 + 0.5, 0 + 0.5 and 1 + 0, with the mean 2.5 / 3; planners: 1, 0, 0.
    assert own == pytest.approx(
        {
            **{("g.0", "planner"): 2 / 3, ("g.1", "planner"): -1 / 3, ("g.2", "planner"): -1 / 3},
            **{("g.0", "searcher_0"): 1 / 6, ("g.0", "searcher_1"): -1 / 3, ("g.1", "searcher_2"): 1 / 6},
        },
        abs=1e-6,
    )


def test_a_frozen_agents_outcome_is_shared_and_it_has_no_samples():
    rewards = {"planner": 1.0, "searcher_0": 0.0}, {"planner": 0.0, "searcher_0": 0.0}
    groups = [grouped("g", *rewards, frozen=("planner",))]
    shared = credited(
        Hierarchical(GroupRelative(rloo), Hierarchy(ROLES, {"searcher": {"planner": 0.5}})), groups
    )
    assert shared == pytest.approx({("g.0", "searcher_0"): 0.5, ("g.1", "searcher_0"): -0.5})
    alone = credited(Hierarchical(GroupRelative(rloo), Hierarchy(ROLES)), groups)
    assert set(alone.values()) == {0.0}


def test_agents_that_were_not_called_are_no_siblings():
    groups = [grouped("g", {"planner": 1.0, "searcher_0": 1.0}, {"planner": 0.0, "searcher_0": 0.0})]
    by_role = Hierarchy(ROLES).by_role(groups[0])
    assert by_role.agents == ("planner", "searcher")
    assert [r.verdict.total for r in by_role.siblings("searcher")] == [1.0, 0.0]
    assert by_role.id == "g"
    assert [v.rollout_id for v in by_role.verdicts] == [
        Hierarchy(ROLES).renamed(v.rollout_id) for v in groups[0].verdicts if v.total < 9
    ]


def test_a_rewritten_history_continues_the_agents_own():
    made = grouped("g", {"planner": 1.0, "searcher_1": 1.0}, split=True)
    for part in Hierarchy(ROLES).by_role(made).episodes:
        assert [(t.parent, t.reason) for t in part.trajectories] == [(None, None), (0, Restart.REWRITTEN)]


def test_what_is_added_counts_at_the_last_turn():
    made = grouped("g", {"planner": 1.0, "searcher_0": 0.5}, {"planner": 0.0, "searcher_0": 0.5})
    verdicts = tuple(
        replace(v, turn_rewards=(0.5, 0.0)) if v.agent == "searcher_0" else v for v in made.verdicts
    )
    groups = [replace(made, verdicts=verdicts)]
    samples = samples_in(groups)
    estimator = Hierarchical(TurnRelative(0.5), Hierarchy(ROLES, {"searcher": {"planner": 1.0}}))
    values = arrays_of(estimator, groups, samples, of_engine(samples)).advantages
    own = [
        a[s.loss_mask].tolist()
        for a, s in zip(values, samples, strict=True)
        if s.rollout_id.agent != "planner"
    ]
    # Returns 0.5 + 0.5 x 1 and 1, against 0.5 and 0.
    assert own == [[0.5, 0.5, 1, 1], [-0.5, -0.5, -1, -1]]


EVERY = [
    GroupRelative(),
    StateRelative(0.5),
    LengthWeighted(),
    OptimalToken(),
    TurnRelative(),
    ReinforcePlusPlus(),
]


@pytest.mark.parametrize("estimator", [*EVERY, Gae(0.9, 0.8)], ids=lambda e: type(e).__name__)
def test_every_estimator_keeps_its_contract_in_a_hierarchy(estimator):
    check_estimator(Hierarchical(estimator, Hierarchy({"agent": "other"})))
    check_estimator(Hierarchical(estimator, Hierarchy()))


CALLED = [
    {"planner": 0.0, "searcher_0": 1.0},
    {"planner": 0.0, "searcher_1": 1.0},
    {"planner": 0.0, "searcher_0": 1.0, "searcher_1": 1.0},
    {"planner": 0.0},
]
"""Whoever is called earns the same each time, so nothing is to be learned."""


# With a discount of 1, since turns of one state are compared, whenever they are.
COMPARING = [GroupRelative(), StateRelative(1.0), LengthWeighted(), OptimalToken(), TurnRelative()]


@pytest.mark.parametrize("estimator", COMPARING, ids=lambda e: type(e).__name__)
def test_calling_a_sub_agent_is_no_merit_of_the_sub_agent(estimator):
    groups = [grouped("g", *CALLED)]
    samples = samples_in(groups)
    squares = tuple(np.full(len(s.token_ids), 0.9, np.float32) for s in samples)
    for values in arrays_of(
        estimator, groups, samples, replace(of_engine(samples), sum_pi_squared=squares)
    ).advantages:
        assert not values.any()


def test_a_baseline_of_a_role_is_of_those_who_acted():
    (group,) = groups = [grouped("g", *CALLED)]
    baselines = RoleBaselines(decay=0.5)
    baselines.observe(groups)
    assert baselines.means == {"planner": 0.0, "searcher_0": 0.75, "searcher_1": 0.75}
    assert [len(group.siblings(name)) for name in AGENTS] == [4, 2, 2, 0]
    assert group.trained_agents == AGENTS[:3]
    assert {v.total for v in group.trained_verdicts} == {0.0, 1.0}
    assert not has_signal(group)


def test_where_nobody_acted_all_are_compared():
    """A prompt that is too long for the first agent, say."""
    group = grouped("g", {}, {"planner": 1.0})
    assert group.episodes[0].trained_agents == AGENTS
    assert [r.verdict.total for r in group.siblings("planner")] == [9.0, 1.0]


@pytest.mark.parametrize("estimator", EVERY, ids=lambda e: type(e).__name__)
def test_with_agents_of_their_own_roles_who_all_act_nothing_changes(estimator):
    groups = [
        grouped(g, *[dict(zip(AGENTS, r, strict=True)) for r in ((1, 0, 2, 3), (0, 2, 2, 1))]) for g in "ab"
    ]
    samples = samples_in(groups)
    squares = tuple(np.full(len(s.token_ids), 0.9, np.float32) for s in samples)
    scores = replace(of_engine(samples), sum_pi_squared=squares)
    plain, own = (
        arrays_of(e, groups, samples, scores).advantages
        for e in (estimator, Hierarchical(estimator, Hierarchy()))
    )
    for a, b in zip(plain, own, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_greedy_siblings_of_a_role_are_its_baseline():
    sampled, greedy = ({"planner": r, "searcher_0": r} for r in (1.0, 0.25))
    made = grouped("g", sampled, greedy)
    likeliest = made.episodes[1]
    turns = tuple(
        replace(
            t,
            turns=tuple(
                replace(x, tokens=replace(x.tokens, completion=replace(x.tokens.completion, temperature=0.0)))
                for x in t.turns
            ),
        )
        for t in likeliest.trajectories
    )
    made = replace(made, episodes=(made.episodes[0], replace(likeliest, trajectories=turns)))
    own = credited(Hierarchical(GreedyBaseline(), Hierarchy(ROLES)), [made])
    assert own["g.0", "searcher_0"] == own["g.0", "planner"] == pytest.approx(0.75)

    called = grouped("g", sampled, {"planner": 0.25})
    called = replace(called, episodes=(called.episodes[0], replace(made.episodes[1], trajectories=turns[:1])))
    # Nobody called the searcher in the greedy episode, so it is compared with nothing.
    for estimator in (GreedyBaseline(), Hierarchical(GreedyBaseline(), Hierarchy(ROLES))):
        own = credited(estimator, [called])
        assert (own["g.0", "planner"], own["g.0", "searcher_0"]) == (0.75, 0.0)


def test_a_group_whose_agents_differ_only_from_each_other_has_a_signal_in_the_role():
    steady = {"planner": 1.0, "searcher_0": 1.0, "searcher_1": 0.0}
    group = grouped("g", steady, steady)
    assert not has_signal(group)
    settings = {"hierarchy_roles": ROLES}
    assert build_is_idle(AlgorithmConfig())(group)
    assert not build_is_idle(AlgorithmConfig(**settings))(group)
    values = credited(build_estimator(AlgorithmConfig(**settings, scale_rewards="none")), [group])
    assert {values["g.0", "searcher_0"], values["g.1", "searcher_1"]} == {0.5, -0.5}
    # Of one that differs by agents that were not called, nothing is left.
    idle = grouped("i", {"planner": 1.0, "searcher_0": 9.0}, {"planner": 1.0, "searcher_1": 9.0})
    assert build_is_idle(AlgorithmConfig(**settings))(idle)
    assert build_is_idle(AlgorithmConfig())(idle)


def test_shaping_comes_first_and_is_shared():
    groups = [grouped("g", {"planner": 1.0, "searcher_0": 0.0}, {"planner": 0.0, "searcher_0": 0.0})]
    shares = {"hierarchy_roles": ROLES, "hierarchy_reward_shares": {"searcher": {"planner": 0.5}}}
    config = AlgorithmConfig(advantage_estimator="rloo", shaping_scale=2.0, **shares)
    values = credited(build_estimator(config), groups)
    assert values["g.0", "searcher_0"] == pytest.approx(1.0)


def test_inputs_stay_as_they_are():
    groups = [grouped("g", {"planner": 1.0, "searcher_0": 0.0}, {"planner": 0.0})]
    samples = samples_in(groups)
    tokens = Tokens.of(samples)
    before = groups[0].verdicts, tokens.rollout_ids
    Hierarchical(GroupRelative(), Hierarchy(ROLES, SHARES))(
        groups, tokens, tokens.scores(Scores(tuple(s.logprobs for s in samples)))
    )
    assert (groups[0].verdicts, tokens.rollout_ids) == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hierarchy_reward_shares": {"a": {"a": 0.5}}}, "reward_shares of a must name other roles"),
        ({"hierarchy_reward_shares": {"a": {}}}, "reward_shares of a must name other roles"),
        ({"hierarchy_reward_shares": {"a": {"b": float("inf")}}}, "finite number"),
        ({"hierarchy_roles": {"a*": ""}}, "needs a name and a role, got 'a\\*'"),
        (
            {"hierarchy_roles": {"a*": "all"}, "hierarchy_reward_shares": {"a1": {"b": 1.0}}},
            "names a1, which hierarchy_roles gives the role all; name the role",
        ),
        (
            {"advantage_estimator": "rae", "hierarchy_reward_shares": {"a": {"b": 1.0}}},
            "rae has a baseline for each agent",
        ),
        (
            {"advantage_estimator": "gdpo", "hierarchy_reward_shares": {"a": {"b": 1.0}}},
            "gdpo compares each reward by its name",
        ),
        ({"advantage_estimator": "gigpo", "scale_rewards": "batch"}, "scale_rewards = group or none"),
    ],
)
def test_nonsense_is_refused(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        AlgorithmConfig(**settings)


def test_roles_that_no_agent_has_are_named_before_anything_is_played():
    config = AlgorithmConfig(hierarchy_roles=ROLES, hierarchy_reward_shares=SHARES)
    check_agents(config, AGENTS)
    check_agents(AlgorithmConfig(), ("agent",))
    with pytest.raises(
        ConfigError, match=r"names searcher, which no agent has as its role; name some of planner\."
    ):
        check_agents(config, ("planner",))
    with pytest.raises(
        ConfigError, match=r"names helper_\*, and no agent is called so; the agents are planner"
    ):
        check_agents(AlgorithmConfig(hierarchy_roles={"helper_*": "helper"}), AGENTS)


def test_the_first_pattern_that_fits_is_an_agents_role():
    roles = {"searcher_0": "lead", "searcher_*": "searcher"}
    assert [role_of(agent, roles) for agent in AGENTS[:3]] == ["planner", "lead", "searcher"]
