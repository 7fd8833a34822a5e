"""The scores of a batch, changed by a function of the whole batch."""

from __future__ import annotations

import math

import pytest

from agentrl.algorithms.contract import check_post_process
from agentrl.algorithms.post_process import BEFORE, post_processed
from agentrl.types import RolloutId
from tests.algorithms.episodes import group


def test_totals_change_where_one_is_given_and_the_one_before_is_a_part():
    groups = [group("g", [1.0, 0.0]), group("h", [0.5, 0.5])]
    first = groups[0].verdicts[0].rollout_id
    mean = sum(v.total for g in groups for v in g.verdicts) / 4

    changed = post_processed(lambda batch: {first: mean}, groups)
    assert [[v.total for v in g.verdicts] for g in changed] == [[0.5, 0.0], [0.5, 0.5]]
    assert changed[0].verdicts[0].parts == {**groups[0].verdicts[0].parts, BEFORE: 1.0}
    assert [v for g in changed for v in g.verdicts][1:] == [v for g in groups for v in g.verdicts][1:]
    assert groups[0].verdicts[0].total == 1.0


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returns totals by RolloutId, not None"),
        ([0.5, 0.5], "returns totals by RolloutId"),
        ({RolloutId("nobody", "agent"): 1.0}, "is no rollout of the batch"),
        ("nan", "is nan, not a finite number"),
        ("text", "is 'much', not a finite number"),
    ],
)
def test_anything_else_is_one_sentence(returned, sentence):
    batch = [group("g", [1.0, 0.0])]
    first = batch[0].verdicts[0].rollout_id
    returned = {"nan": {first: math.nan}, "text": {first: "much"}}.get(str(returned), returned)
    with pytest.raises(ValueError, match=sentence):
        post_processed(lambda _: returned, batch)


def test_the_contract_is_checked_on_small_batches():
    check_post_process(lambda groups: {v.rollout_id: -v.total for g in groups for v in g.verdicts})
    state = iter(range(10**6))
    with pytest.raises(ValueError, match="second call"):
        check_post_process(lambda groups: {v.rollout_id: next(state) for g in groups for v in g.verdicts})
