"""A space of all text."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    iterate,
)
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.gym import TextSpace


@given(text=st.text())
def test_every_string_is_inside(text):
    assert text in TextSpace()
    assert np.str_(text) in TextSpace(["<a>{}</a>"])


@pytest.mark.parametrize("value", [b"bytes", 1, None, ["a"], np.array("a")])
def test_nothing_else_is_inside(value):
    assert value not in TextSpace()


def test_samples_depend_only_on_the_seed_and_are_not_all_ascii():
    space = TextSpace()
    space.seed(3)
    first = [space.sample() for _ in range(50)]
    space.seed(3)
    assert [space.sample() for _ in range(50)] == first
    space.seed(4)
    assert [space.sample() for _ in range(50)] != first
    assert len(set(first)) > 40
    assert not all(text.isascii() for text in first)
    assert all(text in space for text in first)


def test_samples_take_every_form_and_a_mask_or_a_probability_chooses_among_them():
    space = TextSpace(["<a>{}</a>", "<b>{}</b>"], seed=0)
    assert {space.sample()[:3] for _ in range(40)} == {"<a>", "<b>"}
    only = np.array([0, 1], dtype=np.int8)
    assert {space.sample(mask=only)[:3] for _ in range(20)} == {"<b>"}
    assert {space.sample(probability=np.array([1.0, 0.0]))[:3] for _ in range(20)} == {"<a>"}
    with pytest.raises(ValueError, match="not both"):
        space.sample(mask=only, probability=np.array([1.0, 0.0]))


def test_spaces_of_text_are_equal_whatever_their_samples_look_like():
    assert TextSpace() == TextSpace(["<a>{}</a>"], seed=1) == pickle.loads(pickle.dumps(TextSpace()))
    assert TextSpace() != Discrete(2)
    assert len({TextSpace(), TextSpace()}) == 1


@pytest.mark.parametrize(
    "batched", [batch_space(TextSpace(seed=1), 3), batch_differing_spaces([TextSpace()] * 3)]
)
def test_a_batch_is_a_tuple_of_texts(batched):
    texts = ("", "Zürich", "東京\n🙂")
    assert texts in batched
    assert batched.sample() in batched
    assert tuple(iterate(batched, texts)) == texts
    single = TextSpace()
    assert concatenate(single, texts, create_empty_array(single, n=3)) == texts


def test_sampling_does_not_touch_numpys_global_generator():
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    TextSpace(seed=5).sample()
    assert np.random.get_state()[1].tolist() == before
