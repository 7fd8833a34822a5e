from agentrl.algorithms.filters import has_signal
from tests.algorithms.episodes import group


def test_siblings_that_did_differently_are_a_signal():
    rewards = [[0, 0, 0], [0, 1, 0], [1, 1, 1], [0.5, 0.5, 0.6], [0.1]]
    assert [has_signal(group("g", totals)) for totals in rewards] == [False, True, False, True, False]
