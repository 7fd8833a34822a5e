from dataclasses import replace

from agentrl.algorithms.filters import has_signal, highest_std, truncated
from agentrl.types import Ending, RolloutId
from tests.algorithms.episodes import group


def test_siblings_that_did_differently_are_a_signal():
    rewards = [[0, 0, 0], [0, 1, 0], [1, 1, 1], [0.5, 0.5, 0.6], [0.1]]
    assert [has_signal(group("g", totals)) for totals in rewards] == [False, True, False, True, False]


def test_the_groups_whose_rewards_differ_most_are_chosen():
    rewards = [[0, 0], [0, 1], [1, 1, 0, 0, 0, 0], [0, 1], [0, 3]]
    groups = [group(f"g{n}", totals) for n, totals in enumerate(rewards)]
    chosen = [[g.id for g in highest_std(groups, number)] for number in (1, 3, 5)]
    assert chosen == [["g4"], ["g4", "g1", "g3"], ["g4", "g1", "g3", "g2", "g0"]]


def test_truncated_episodes_are_taken_out_of_the_loss():
    played = group("g", [0, 1, 1])
    cut = tuple(replace(e, ending=Ending.TRUNCATED) if e.id == "g.1" else e for e in played.episodes)
    assert truncated([played, replace(played, id="h", episodes=cut)]) == {RolloutId("g.1"): "truncated"}
