"""What a conversion may change of samples: fewer tokens in the loss, more extras; nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl.algorithms.contract import check_conversion, check_data_post_process, small_groups
from agentrl.algorithms.conversion import converted, post_processed_data, train_metadata
from agentrl.algorithms.samples import samples_of
from agentrl.types import Extra, RolloutId, Scores

GROUPS = small_groups()
SAMPLES = [sample for group in GROUPS for episode in group.episodes for sample in samples_of(episode)]
LONGEST = max(range(len(SAMPLES)), key=lambda i: int(SAMPLES[i].loss_mask.sum()))


def with_one(**changes):
    """The samples, of which one has other arrays."""
    return [replace(s, **changes) if i == LONGEST else s for i, s in enumerate(SAMPLES)]


def narrowed(groups, samples):
    return [replace(s, loss_mask=s.loss_mask & (np.arange(len(s)) % 2 == 0)) for s in samples]


def extended(groups, samples):
    return [
        replace(s, extras={**s.extras, "place": Extra.dense(np.arange(len(s), dtype=np.float32))})
        for s in samples
    ]


@pytest.mark.parametrize("function", [narrowed, extended, lambda groups, samples: samples])
def test_fewer_tokens_and_more_extras_pass(function):
    returned = converted(function, GROUPS, SAMPLES)
    assert [s.token_ids.tolist() for s in returned] == [s.token_ids.tolist() for s in SAMPLES]
    check_conversion(function)


SAMPLE = SAMPLES[LONGEST]
OTHER = np.where(SAMPLE.loss_mask, SAMPLE.logprobs - 1.0, 0.0).astype(np.float32)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "one for each, not None"),
        (SAMPLES[1:], rf"returns {len(SAMPLES)} samples, one for each, not {len(SAMPLES) - 1} samples"),
        ([1] * len(SAMPLES), "one for each, not"),
        (SAMPLES[::-1], "in another order"),
        (with_one(token_ids=SAMPLE.token_ids + 1), "the token_ids of a sample of .* have changed"),
        (with_one(logprobs=OTHER), "the logprobs of a sample of .* have changed"),
        (with_one(temperatures=SAMPLE.temperatures + 1.0), "the temperatures of a sample"),
        (with_one(rollout_id=RolloutId("x")), "in another order"),
        (with_one(privileged_ids=np.zeros(1, np.int32)), "the privileged_ids of"),
    ],
)
def test_whatever_was_recorded_stays(returned, sentence):
    with pytest.raises(ValueError, match=sentence):
        converted(lambda groups, samples: returned, GROUPS, SAMPLES)


def test_no_token_comes_back_and_no_extra_goes():
    less = converted(narrowed, GROUPS, SAMPLES)
    with pytest.raises(ValueError, match="came under the loss mask that was not under it"):
        converted(lambda groups, samples: SAMPLES, GROUPS, less)
    more = converted(extended, GROUPS, SAMPLES)
    with pytest.raises(ValueError, match=r"the extra 'place' of .* is gone"):
        converted(lambda groups, samples: SAMPLES, GROUPS, more)


def test_one_that_draws_at_random_is_refused():
    rng = np.random.default_rng(0)

    def random(groups, samples):
        return [replace(s, loss_mask=s.loss_mask & (rng.random(len(s)) < 0.5)) for s in samples]

    with pytest.raises(ValueError, match="a second call decided otherwise"):
        check_conversion(random)


def test_a_post_processing_sees_the_scores_and_is_held_to_the_same():
    scores = Scores(tuple(sample.logprobs - 1.0 for sample in SAMPLES))

    def below(samples, scores):
        pairs = zip(samples, scores.proximal, strict=True)
        return [replace(s, loss_mask=s.loss_mask & (p < s.logprobs.mean() - 1.0)) for s, p in pairs]

    returned = post_processed_data(below, SAMPLES, scores)
    assert 0 < sum(int(s.loss_mask.sum()) for s in returned) < sum(int(s.loss_mask.sum()) for s in SAMPLES)
    check_data_post_process(below)
    with pytest.raises(ValueError, match="in another order"):
        check_data_post_process(lambda samples, scores: samples[::-1])
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="a second call decided otherwise"):
        check_data_post_process(
            lambda samples, scores: [
                replace(s, loss_mask=s.loss_mask & (rng.random(len(s)) < 0.5)) for s in samples
            ]
        )


def test_numbers_of_a_row_become_extras_of_its_tokens():
    def with_metadata(number, **metadata):
        group = GROUPS[number]
        episodes = (replace(e, task=replace(e.task, metadata=metadata)) for e in group.episodes)
        return replace(group, episodes=tuple(episodes))

    groups = [with_metadata(n, train_metadata={"level": n, "weight": 0.5}) for n in range(len(GROUPS))]
    levels = {e.id: n for n, group in enumerate(groups) for e in group.episodes}
    for before, after in zip(SAMPLES, converted(train_metadata, groups, SAMPLES), strict=True):
        level = levels[before.rollout_id.episode]
        assert after.extras["level"].values.tolist() == [level] * len(before)
        assert after.extras["weight"].values.tolist() == [0.5] * len(before)
    check_conversion(train_metadata)
    for wrong in ({"train_metadata": {"level": "high"}}, {"train_metadata": 3}):
        with pytest.raises(ValueError, match="has other things than numbers by name in `train_metadata`"):
            train_metadata([with_metadata(0, **wrong), *groups[1:]], SAMPLES)
