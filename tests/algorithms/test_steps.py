from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.filters import has_signal
from agentrl.algorithms.steps import balanced
from tests.algorithms.episodes import group

FLAGS = st.lists(st.booleans(), max_size=20)


def groups_of(flags):
    return [group(f"g{i}", [0, 1] if apart else [1, 1]) for i, apart in enumerate(flags)]


@given(FLAGS, st.integers(1, 6))
def test_steps_hold_every_group_once_and_nearly_equally_many_of_each_kind(flags, n):
    groups = groups_of(flags)
    steps = balanced(groups, n)
    assert sorted(g.id for step in steps for g in step) == sorted(g.id for g in groups)
    assert len(steps) == min(n, len(groups))
    sizes = [len(step) for step in steps]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    telling = [sum(map(has_signal, step)) for step in steps]
    assert max(telling, default=0) - min(telling, default=0) <= 1
    places = {g.id: i for i, g in enumerate(groups)}
    assert all([places[g.id] for g in step] == sorted(places[g.id] for g in step) for step in steps)


def test_one_step_is_the_batch_as_it_was_played():
    groups = groups_of([True, False, True, False, False])
    assert balanced(groups, 1) == [groups]
