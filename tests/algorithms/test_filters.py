from agentrl.algorithms.filters import has_signal, split_by_signal
from tests.algorithms.episodes import group


def test_groups_whose_siblings_all_did_alike_are_set_aside_in_order():
    groups = [
        group("a", [0, 0, 0]),
        group("b", [0, 1, 0]),
        group("c", [1, 1, 1]),
        group("d", [0.5, 0.5, 0.6]),
        group("e", [0.1]),
    ]
    trained, dropped = split_by_signal(groups)
    assert [g.id for g in trained] == ["b", "d"]
    assert [g.id for g in dropped] == ["a", "c", "e"]
    assert [has_signal(g) for g in groups] == [False, True, False, True, False]
