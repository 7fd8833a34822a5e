"""Rows are filled up and cut so that every token is somewhere once, and every replica has something to do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.megatron.rows import Cut, pieces_of, row_of, shared_out
from agentrl.trainer.torch.batch import micro_batches
from tests.algorithms.episodes import sample

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


def rows_of(drawn, max_tokens=20):
    samples = [sample(f"r{number}", [False, *mask]) for number, mask in enumerate(drawn)]
    return micro_batches(samples, [one.loss_mask for one in samples], max_tokens)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_has_a_piece_from_each_end_of_a_sequence(ranks):
    pieces = [pieces_of(4 * ranks, ranks, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(pieces)) == list(range(4 * ranks))
    # Equal work: each looks back at as many tokens in all.
    assert len({int(piece.sum()) for piece in pieces}) == 1
    assert pieces[0][0] == 0
    assert pieces[0][-1] == 4 * ranks - 1


@given(masks, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([0, 40]))
def test_every_predicted_token_is_predicted_by_one_rank_from_its_own_token(drawn, ranks, shares, least):
    multiple = 2 * ranks if ranks > 1 else 1
    for micro in rows_of(drawn):
        cuts = [Cut(multiple, multiple * shares, ranks, rank, least) for rank in range(ranks)]
        rows = [row_of(micro, cut) for cut in cuts]
        told = np.concatenate([row.chosen_n for row in rows])
        assert sorted(told) == list(range(len(micro.targets_N)))
        for row in rows:
            assert len(row.input_ids_t) * ranks == row.bounds[-1] == cuts[0].filled(micro)
            assert row.bounds[-1] % (multiple * shares) == 0
            assert row.bounds[-1] >= least
            at = micro.predictor_N[row.chosen_n]
            assert (row.input_ids_t[row.predictor_n] == micro.input_ids_T[at]).all()
            assert (row.position_ids_t[row.predictor_n] == micro.position_ids_T[at]).all()
        lengths = np.diff(rows[0].bounds)[: len(micro.lengths)]
        assert all(filled >= length for filled, length in zip(lengths, micro.lengths, strict=True))
        assert rows[0].longest == np.diff(rows[0].bounds).max()


@given(masks, st.integers(1, 4), st.sampled_from([1, 2]))
def test_replicas_share_all_rows_and_none_has_nothing(drawn, replicas, multiple):
    rows = rows_of(drawn, max_tokens=8)
    shares = shared_out(rows, replicas, count_multiple=multiple)
    assert len(shares) == replicas
    assert all(len(share) >= 1 and len(share) % multiple == 0 for share in shares)
    told = Counter(id(row) for share in shares for row in share if len(row.targets_N))
    assert told == Counter(id(row) for row in rows)
    for empty in (row for share in shares for row in share if not len(row.targets_N)):
        assert empty.gather([np.ones(3, np.float32)]).shape == (0,)


def test_the_largest_rows_are_spread_first():
    rows = rows_of([[True] * n for n in (9, 8, 2, 1)], max_tokens=10)
    loads = [sum(len(row.input_ids_T) for row in share) for share in shared_out(rows, 2)]
    assert max(loads) - min(loads) <= 2
