"""The data types refuse inconsistent values."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types import (
    NO_VERSION,
    Author,
    Completion,
    Credit,
    Ending,
    Episode,
    Failure,
    Finish,
    Group,
    Limits,
    Message,
    RolloutId,
    Sample,
    Scores,
    Step,
    Task,
    ToolCall,
    TrainBatch,
    Trajectory,
    Turn,
    Verdict,
    call,
    say,
)

W, P, D = Author.WORLD, Author.POLICY, Author.DEMO


def arrays(authors, **changed):
    """The arrays of a sound Sample whose tokens were written by `authors`, with some replaced."""
    author = np.asarray(authors, np.int8)
    policy = author == P
    fields = {
        "token_ids": np.arange(len(author), dtype=np.int32),
        "author": author,
        "loss_mask": author != W,
        "logprobs": np.where(policy, -0.5, 0.0).astype(np.float32),
        "versions": np.where(policy, 3, NO_VERSION).astype(np.int32),
        "turns": np.zeros(len(author), np.int32),
        "temperatures": np.ones(len(author), np.float32),
    }
    return {**fields, **changed}


def sample(authors, **changed):
    return Sample(**arrays(authors, **changed), rollout_id=RolloutId("e"))


def episode(name="e0", task=None, seed=0, **changed):
    fields = {
        "id": name,
        "env_id": "Env-v0",
        "task": task or Task.ask("t", "?"),
        "seed": seed,
        "limits": Limits(),
        "trajectories": (),
        "step_rewards": (),
        "ending": Ending.COMPLETED,
    }
    return Episode(**{**fields, **changed})


def test_a_sound_sample_is_accepted_and_has_a_length():
    assert len(sample([W, P, P, W, D])) == 5


@pytest.mark.parametrize("name", ["token_ids", "author", "loss_mask", "logprobs", "versions"])
@pytest.mark.parametrize("change", [lambda a: a[:-1], lambda a: np.append(a, a[-1:])])
def test_a_sample_refuses_an_array_of_another_length(name, change):
    with pytest.raises(ValueError, match="must share one length"):
        sample([W, P, P], **{name: change(arrays([W, P, P])[name])})


def test_a_sample_refuses_two_dimensions():
    twice = {name: np.stack([a, a]) for name, a in arrays([W, P]).items()}
    with pytest.raises(ValueError, match="must share one length"):
        Sample(**twice, rollout_id=RolloutId("e"))


def test_a_sample_refuses_to_be_empty():
    with pytest.raises(ValueError, match="needs a first token"):
        sample([])


def test_a_sample_refuses_to_train_its_first_token():
    with pytest.raises(ValueError, match="never trained on"):
        sample([P, P])


def test_a_sample_refuses_a_mask_over_the_worlds_tokens():
    with pytest.raises(ValueError, match="the world wrote"):
        sample([W, P, W], loss_mask=np.array([False, True, True]))


def test_a_mask_may_leave_out_policy_tokens():
    partial = sample([W, P, P], loss_mask=np.array([False, False, True]))
    assert partial.loss_mask.sum() == 1


@pytest.mark.parametrize("versions", [[-1, -1, 3], [-1, 3, -1], [3, 3, 3]])
def test_a_sample_refuses_versions_that_are_not_exactly_on_the_policys_tokens(versions):
    with pytest.raises(ValueError, match="carry a version"):
        sample([W, P, P], versions=np.asarray(versions, np.int32))


@pytest.mark.parametrize("logprobs", [[0, math.nan, -1], [0, -1, -math.inf], [-1, -1, -1]])
def test_a_sample_refuses_logprobs_that_are_missing_or_on_foreign_tokens(logprobs):
    with pytest.raises(ValueError, match="logprob"):
        sample([W, P, P], logprobs=np.asarray(logprobs, np.float32))


def test_a_sample_refuses_a_logprob_or_a_version_on_a_demonstrated_token():
    with pytest.raises(ValueError, match="logprob"):
        sample([W, D], logprobs=np.asarray([0, -1], np.float32))
    with pytest.raises(ValueError, match="version"):
        sample([W, D], versions=np.asarray([NO_VERSION, 0], np.int32))


@given(st.lists(st.sampled_from([W, P, D]), min_size=1, max_size=12), st.data())
def test_a_sample_accepts_exactly_the_masks_that_spare_the_world_and_the_first_token(authors, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(authors), max_size=len(authors)))
    allowed = not any(m and (t == 0 or a == W) for t, (m, a) in enumerate(zip(mask, authors, strict=True)))
    try:
        sample(authors, loss_mask=np.asarray(mask))
    except ValueError:
        assert not allowed
    else:
        assert allowed


@pytest.mark.parametrize("name", ["token_ids", "author", "loss_mask", "logprobs", "versions"])
def test_the_arrays_of_a_sample_cannot_be_written(name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(sample([W, P]), name)[0] = 1


@pytest.mark.parametrize("short", ["token_ids", "logprobs", "versions"])
def test_a_completion_refuses_arrays_of_different_lengths(short):
    fields = {
        "token_ids": np.zeros(2, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "versions": np.zeros(2, np.int32),
    }
    with pytest.raises(ValueError, match="must share one length"):
        Completion(**{**fields, short: fields[short][:1]}, finish=Finish.STOP)


@pytest.mark.parametrize(("arguments", "error"), [(None, None), ({}, "wrong")])
def test_a_tool_call_has_arguments_or_an_error_never_both_never_neither(arguments, error):
    with pytest.raises(ValueError, match="exactly one"):
        ToolCall("f", arguments, error=error)


def test_a_tool_call_without_arguments_is_not_malformed():
    assert ToolCall("f", {}).error is None
    assert ToolCall("f", None, error="no").arguments is None


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_only_the_assistant_calls_tools(role):
    with pytest.raises(ValueError, match="only the assistant"):
        Message(role, tool_calls=(ToolCall("f", {}),))


def test_call_and_say_are_what_a_script_yields():
    assert call("f", name="x").tool_calls == (ToolCall("f", {"name": "x"}),)
    assert say("x") == Message("assistant", "x")


@pytest.mark.parametrize("name", [limit.name for limit in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_limit_of_zero_or_less_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        Limits(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("max_turns", None), ("max_turns", "8"), ("max_tokens", "many")])
def test_a_limit_that_is_no_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0, got {value!r}"):
        Limits(**{name: value})


def test_every_limit_but_the_turns_may_be_off():
    names = [limit.name for limit in dataclasses.fields(Limits)]
    assert dataclasses.astuple(Limits(**dict.fromkeys(names[1:]))) == (8, *[None] * 8)


@pytest.mark.parametrize("total", [math.nan, math.inf, -math.inf])
def test_a_verdict_refuses_what_is_not_a_number(total):
    with pytest.raises(ValueError, match="finite"):
        Verdict("e", "env", total)


def test_an_episode_fails_exactly_with_a_failure():
    with pytest.raises(ValueError, match="exactly when"):
        episode(ending=Ending.FAILED)
    with pytest.raises(ValueError, match="exactly when"):
        episode(failure=Failure("tool", "error", "x"))
    assert (
        episode(ending=Ending.FAILED, failure=Failure("tool", "timeout", "x")).failure.name == "tool_timeout"
    )


def test_the_turns_of_an_episode_run_over_all_its_trajectories():
    turns = [Turn((), say(str(k)), None, k) for k in range(3)]
    two = (Trajectory((turns[0],)), Trajectory((turns[1], turns[2])))
    assert [turn.action.content for turn in episode(trajectories=two).turns] == ["0", "1", "2"]


def test_a_group_refuses_episodes_of_another_task_or_seed():
    task = Task.ask("t", "?")
    for foreign in (episode("e1", Task.ask("other", "?")), episode("e1", task, seed=1)):
        with pytest.raises(ValueError, match=r"\{'e1'\} played another"):
            Group(
                "g",
                task,
                0,
                (episode("e0", task), foreign),
                (Verdict("e0", "s", 0.0), Verdict("e1", "s", 1.0)),
            )


def test_a_group_refuses_verdicts_that_stand_in_another_order_or_are_missing():
    task = Task.ask("t", "?")
    both = (episode("e0", task), episode("e1", task))
    for verdicts in ((Verdict("e1", "s", 0.0), Verdict("e0", "s", 1.0)), (Verdict("e0", "s", 0.0),)):
        with pytest.raises(ValueError, match="order of the episodes"):
            Group("g", task, 0, both, verdicts)


def test_credit_refuses_advantages_and_weights_of_different_shapes():
    short, long = np.zeros(1, np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="share their shapes"):
        Credit((short, long), (long, short))


def test_credit_and_scores_refuse_other_shapes_everywhere():
    short, long = (np.zeros(1, np.float32),), (np.zeros(2, np.float32),)
    with pytest.raises(ValueError, match="share their shapes"):
        Credit(short, short, returns=long)
    for name in ("ref", "teacher", "values"):
        with pytest.raises(ValueError, match="share their shapes"):
            Scores(short, **{name: long})
        assert getattr(Scores(short, **{name: short}), name) == short


@pytest.mark.parametrize("turns", [[-1, 0], [1, 0]])
def test_a_sample_refuses_turns_that_fall(turns):
    with pytest.raises(ValueError, match="counted from 0"):
        sample([W, P], turns=np.array(turns, np.int32))


def test_a_batch_refuses_counts_that_differ():
    zeros = (np.zeros(2, np.float32),)
    with pytest.raises(ValueError, match="one to one"):
        TrainBatch((sample([W, P]),), Scores(()), Credit(zeros, zeros))
    batch = TrainBatch((sample([W, P]),), Scores(zeros), Credit(zeros, zeros))
    assert batch.num_loss_tokens == 1


def test_the_constructors_of_a_step_return_gymnasiums_five_values():
    message = Message("tool", "x")
    assert Step.going(message, note=1) == ((message,), None, False, False, {"note": 1})
    assert Step.finished(message, reward=0.0) == ((message,), 0.0, True, False, {})
    assert Step.cut(message, reward=1.0) == ((message,), 1.0, False, True, {})


@pytest.mark.parametrize(
    ("instance", "field"),
    [
        (Message("user"), "content"),
        (Task.ask("t", "?"), "answer"),
        (Verdict("e", "s", 1.0), "total"),
        (episode(), "ending"),
        (Limits(), "max_turns"),
    ],
)
def test_data_types_are_frozen(instance, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, field, None)
