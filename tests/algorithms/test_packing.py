from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.batch import pack

lengths = st.lists(st.integers(1, 40), max_size=30)


@given(lengths, st.integers(1, 100))
def test_every_sample_is_in_one_row_and_rows_keep_to_their_limit(lengths, max_tokens):
    rows = pack(lengths, max_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(rows)
    for row in rows:
        assert sum(lengths[i] for i in row) <= max_tokens or len(row) == 1
    assert rows == pack(list(lengths), max_tokens)


@given(lengths, st.integers(1, 100))
def test_a_row_ends_only_where_the_next_sample_does_not_fit(lengths, max_tokens):
    for row, after in pairwise(pack(lengths, max_tokens)):
        assert sum(lengths[i] for i in row) + lengths[after[0]] > max_tokens


@given(lengths, st.integers(1, 100))
def test_neighbours_are_of_like_length(lengths, max_tokens):
    order = [lengths[i] for row in pack(lengths, max_tokens) for i in row]
    assert order == sorted(lengths, reverse=True)


def test_the_example_of_the_docstring():
    assert pack([3, 5, 2, 2], max_tokens=6) == ((1,), (0, 2), (3,))


def test_nothing_packs_into_nothing():
    assert pack([], 5) == ()


@pytest.mark.parametrize(("lengths", "max_tokens"), [([1], 0), ([0, 1], 5)])
def test_sizes_below_one_are_refused(lengths, max_tokens):
    with pytest.raises(ValueError, match="at least 1"):
        pack(lengths, max_tokens)
