"""Privileged prompts: where the text stands, and which tokens of the teacher's row are whose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.distillation import (
    aligned,
    answer,
    check_privileged_context,
    check_rows,
    first_sampled,
    privileged_prompt,
    teachers_row,
)
from agentrl.errors import UserError
from agentrl.types import NO_VERSION, Author, Extra, Image, Message, RolloutId, Sample, Task, Text

W, P = Author.WORLD, Author.POLICY


def row_of(authors, privileged=None, **changed):
    """A sample whose t-th token is 100 + t."""
    author = np.array(authors, dtype=np.int8)
    number, sampled = len(author), author == P
    values = {
        "token_ids": np.arange(100, 100 + number, dtype=np.int32),
        "author": author,
        "loss_mask": sampled,
        "logprobs": np.where(sampled, -0.5, 0).astype(np.float32),
        "versions": np.where(sampled, 3, NO_VERSION).astype(np.int32),
        "turns": np.cumsum(np.diff(author, prepend=0) < 0).astype(np.int32) + 2,
        "temperatures": np.where(sampled, 0.7, 1).astype(np.float32),
        "rollout_id": RolloutId("e1"),
        "privileged_ids": None if privileged is None else np.array(privileged, dtype=np.int32),
    }
    return Sample(**{**values, **changed})


@pytest.mark.parametrize(
    ("roles", "at"),
    [
        (("user",), 0),
        (("system", "user"), 1),
        (("system", "user", "user"), 2),
        (("system", "user", "assistant", "tool"), 1),
        (("system", "user", "assistant", "user"), 1),
        (("system", "assistant", "user", "assistant"), 2),
        (("system",), 0),
        (("assistant", "tool"), 0),
    ],
)
def test_the_text_is_at_the_end_of_the_question(roles, at):
    prompt = tuple(Message(role, f"m{n}") for n, role in enumerate(roles))
    extended = privileged_prompt(prompt, "42")
    assert [m.content for m in extended] == [f"m{n}" + "\n\n42" * (n == at) for n in range(len(roles))]
    assert [m.role for m in extended] == list(roles)


def test_images_stay_where_they_are():
    picture = Image.of(b"x")
    (message,) = privileged_prompt((Message("user", (Text("see"), picture)),), "42")
    assert message.content == (Text("see"), picture, Text("\n\n42"))


@given(
    world=st.integers(1, 5),
    rest=st.lists(st.sampled_from([W, P]), max_size=9),
    privileged=st.lists(st.integers(0, 99), min_size=1, max_size=9),
)
def test_every_token_from_the_first_sampled_one_on_stands_in_the_teachers_row_once(world, rest, privileged):
    sample = row_of([*[W] * world, P, *rest], privileged)
    row = teachers_row(sample)
    assert row.token_ids.tolist() == [*privileged, *sample.token_ids[world:].tolist()]
    for name in ("author", "loss_mask", "logprobs", "versions", "turns", "temperatures"):
        ours, theirs = getattr(row, name), getattr(sample, name)
        assert ours[len(privileged) :].tolist() == theirs[world:].tolist(), name
        assert ours.dtype == theirs.dtype
    assert not row.loss_mask[: len(privileged)].any()
    # Scored by a function of the token alone, both rows agree wherever the policy has sampled.
    scored = aligned([sample], [-row.token_ids.astype(np.float32)])[0]
    assert scored[world:].tolist() == (-sample.token_ids[world:]).tolist()
    assert not scored[:world].any()


def test_without_a_privileged_prompt_the_teacher_reads_what_the_policy_reads():
    sample = row_of([W, W, P, P, W, P])
    assert teachers_row(sample) is sample
    (scored,) = aligned([sample], [np.arange(6, dtype=np.float32)])
    assert scored.tolist() == [0, 0, 2, 3, 4, 5]
    silent = row_of([W, W], [1, 2, 3])
    assert first_sampled(silent) == 2
    assert teachers_row(silent).token_ids.tolist() == [1, 2, 3]
    assert aligned([silent], [np.ones(3, dtype=np.float32)])[0].tolist() == [0, 0]


def test_the_teachers_row_keeps_what_top_p_and_top_k_kept():
    kept = Extra.of_lists([np.array(ids, np.int32) for ids in ([], [], [102, 7], [103])])
    row = teachers_row(row_of([W, W, P, P], [1, 2, 3], extras={"kept_ids": kept}))
    assert [ids.tolist() for ids in row.extras["kept_ids"].lists()] == [[], [], [], [102, 7], [103]]


def test_a_row_that_is_too_long_is_one_sentence_and_the_policys_own_is_not():
    long, own = row_of([W, P, P], range(7)), row_of([W] * 12 + [P])
    check_rows([long, own], [teachers_row(long), teachers_row(own)], 9)
    with pytest.raises(UserError, match="episode e1 has 9 tokens, 7 of them its privileged prompt") as caught:
        check_rows([long], [teachers_row(long)], 8)
    assert "raise max_tokens_per_gpu" in str(caught.value)


def test_a_function_of_a_task_is_text_or_none():
    assert "42" in answer(Task.ask("a", "?", "42"), "agent")
    assert answer(Task.ask("a", "?"), "agent") is None
    check_privileged_context(answer)
    for wrong in (7, "", b"x"):
        with pytest.raises(ValueError, match="text, or None for none"):
            check_privileged_context(lambda task, agent, value=wrong: value)
