"""Episodes as conversations: read by the reader of SFT, each message of the model trained on once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agentrl.data.conversations import Dialogues
from agentrl.records import Outcome
from agentrl.types import Ending, Message, ToolCall, Trajectory, Turn, Verdict
from agentrl.view.formats.messages import MALFORMED, imported_of, rows_of
from agentrl.view.formats.provenance import Provenance
from tests.view.episodes.journals import entry, failed, searched
from tests.view.formats.played import duel, restarted

PLACE = Provenance("step_000001", "run", "policy", 0.0)


def rows(*entries):
    return [row for one in entries for row in rows_of(one, PLACE)]


def dialogues(found, path):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return [*Dialogues(str(path), messages_key="messages", tools_key=None)]


def without_raw(message):
    """The message as a conversation holds it: the text of a call is that of its arguments."""
    calls = tuple(replace(call, raw=json.dumps(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=calls)


def test_a_row_is_the_conversation_and_its_reward(tmp_path):
    episode = searched("g0-0")
    (row,) = rows(entry(episode))
    assert (row["episode"], row["reward"], row["outcome"]) == ("g0-0", 1.0, "trained")
    (dialogue,) = dialogues([row], tmp_path / "x.jsonl")
    heard = [tuple(turn.observation) for turn in dialogue.turns]
    assert heard == [turn.observation for turn in episode.turns]
    assert [turn.action for turn in dialogue.turns] == [without_raw(turn.action) for turn in episode.turns]


def test_after_a_restart_each_message_of_the_model_is_trained_once(tmp_path):
    found = dialogues(rows(entry(restarted("g0-0"))), tmp_path / "x.jsonl")
    trained = [[turn.is_trained for turn in dialogue.turns] for dialogue in found]
    assert trained == [[True, True], [False, True]]
    assert found[1].turns[-1].action.text == "Kelmar"


def test_the_turns_of_a_frozen_agent_are_no_rows():
    game = duel("g0-0")
    verdicts = (Verdict("g0-0", "env", 1.0, agent="white"), Verdict("g0-0", "env", -1.0, agent="black"))
    (row,) = rows(replace(entry(game, None, Outcome.DROPPED, reason="x"), verdicts=verdicts))
    assert (row["agent"], row["reward"]) == ("white", 1.0)


def test_what_cannot_be_imitated_is_left_out_with_its_reason():
    call = ToolCall("f", None, "f(", error="x")
    wrong = Turn((Message("user", "?"),), Message("assistant", "", tool_calls=(call,)), None)
    broken = searched("g0-1", trajectories=(Trajectory((wrong,)),), step_rewards=(None,))
    assert rows(entry(searched("g0-0", ending=Ending.TRUNCATED)), failed(), entry(broken)) == [
        "truncated", "failed", MALFORMED,
    ]  # fmt: skip


def test_a_conversation_becomes_an_episode_without_tokens():
    (row,) = rows(entry(searched("g0-0")))
    found = imported_of(json.loads(json.dumps(row)), "g7-0", "x.jsonl line 1")
    assert [turn.action.text for turn in found.episode.turns] == ["", "Kelmar"]
    assert [turn.tokens for turn in found.episode.turns] == [None, None]
    assert (found.verdict.total, found.episode.task.prompt) == (1.0, searched().task.prompt)


@pytest.mark.parametrize(
    ("messages", "reward", "sentence"),
    [
        ("hi", None, "`messages` is no list"),
        ([], None, "is an empty list"),
        ([{"role": "pilot", "content": "x"}], None, "of the role 'pilot'"),
        ([{"role": "user", "content": "x"}], "good", "has the reward 'good'"),
        ([{"role": "user", "content": "x"}], 10**400, "int too large"),
    ],
)
def test_what_is_no_conversation_is_named(messages, reward, sentence):
    with pytest.raises(ValueError, match=sentence):
        imported_of({"messages": messages, "reward": reward}, "g0-0", "x.jsonl line 1")
