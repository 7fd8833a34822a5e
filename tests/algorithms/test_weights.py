from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.weights import constant, prompt_mean, rollout_mean, sample_mean, token_mean, ungrouped
from tests.algorithms.batches import EpisodeSpec, batch, batches, by_sample, walk
from tests.algorithms.episodes import sample

masks = st.lists(st.lists(st.integers(0, 1), max_size=6).map(lambda rest: [0, *rest]), max_size=6)
MAX_LENGTH = 50
FUNCTIONS = {
    "token_mean": ungrouped(token_mean),
    "sample_mean": ungrouped(sample_mean),
    "rollout_mean": ungrouped(rollout_mean),
    "prompt_mean": prompt_mean,
    "constant": ungrouped(partial(constant, max_length=MAX_LENGTH)),
}


def naive_weights(name, drawn):
    samples, episodes = drawn.samples, walk(drawn.samples)
    prompts = {e.id: g.id for g in drawn.groups for e in g.episodes}
    per_prompt = Counter(prompts[id.episode] for id, tokens in episodes.items() for _ in tokens)
    everything = sum(len(tokens) for tokens in episodes.values())
    weights = {}
    for id, tokens in episodes.items():
        for token in tokens:
            in_sample = sum(1 for other in tokens if other.sample == token.sample)
            weights[token.sample, token.position] = {
                "token_mean": 1 / everything,
                "sample_mean": 1 / len(samples) / in_sample,
                "rollout_mean": 1 / len(episodes) / len(tokens),
                "prompt_mean": 1 / len(drawn.groups) / per_prompt[prompts[id.episode]],
                "constant": 1 / len(episodes) / MAX_LENGTH,
            }[name]
    return by_sample(samples, weights)


@given(masks)
def test_every_loss_token_weighs_the_same_over_the_whole_step(sample_masks):
    weights = token_mean([sample("e", mask) for mask in sample_masks])
    number = sum(map(sum, sample_masks))
    expected = [[np.float32(1 / number) if bit else 0.0 for bit in mask] for mask in sample_masks]
    assert [w.tolist() for w in weights] == expected


@given(drawn=batches())
def test_weights_agree_with_naive_counts(drawn):
    for name, function in FUNCTIONS.items():
        weights = function(drawn.samples_by_group)
        assert [w.tolist() for w in weights] == [pytest.approx(w) for w in naive_weights(name, drawn)]
        assert {w.dtype for w in weights} == {np.dtype(np.float32)}


def test_each_name_is_its_own_count_and_no_other():
    drawn = batch([EpisodeSpec([2, 1, 3], split=1), EpisodeSpec([1])], [EpisodeSpec([2])])
    same = {
        (name, other)
        for name, other in product(FUNCTIONS, FUNCTIONS)
        if np.allclose(
            np.concatenate(FUNCTIONS[name](drawn.samples_by_group)),
            np.concatenate(naive_weights(other, drawn)),
            rtol=1e-3,
        )
    }
    assert same == {(name, name) for name in FUNCTIONS}


@pytest.mark.parametrize("name", ["token_mean", "rollout_mean", "prompt_mean", "constant"])
def test_splitting_an_episode_changes_no_weight_of_its_tokens(name):
    unsplit, split = (
        batch([EpisodeSpec([2, 3, 1]), EpisodeSpec([2])]),
        batch([EpisodeSpec([2, 3, 1], split=2), EpisodeSpec([2])]),
    )
    per_token = [np.concatenate(FUNCTIONS[name](b.samples_by_group)) for b in (unsplit, split)]
    assert len(split.samples) == 3
    assert per_token[0][per_token[0] > 0].tolist() == per_token[1][per_token[1] > 0].tolist()


def test_what_has_no_loss_tokens_still_counts_as_a_sample_and_an_episode():
    samples = [sample("a", [0, 1, 1]), sample("b", [0, 0])]
    assert [w.tolist() for w in sample_mean(samples)] == [[0, 0.25, 0.25], [0, 0]]
    assert [w.tolist() for w in rollout_mean(samples)] == [[0, 0.25, 0.25], [0, 0]]
    assert [w.tolist() for w in prompt_mean([samples[:1], samples[1:]])] == [[0, 0.25, 0.25], [0, 0]]
    assert [w.tolist() for w in constant(samples, max_length=5)] == [[0, *[np.float32(0.1)] * 2], [0, 0]]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_weighs_nothing(name):
    assert FUNCTIONS[name]([]) == ()
    assert [w.tolist() for w in FUNCTIONS[name]([[sample("a", [0, 0])]])] == [[0, 0]]


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1 token"):
        constant([], max_length=0)
