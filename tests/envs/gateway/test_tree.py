"""What a request continues: of all conversations that it begins with, the one with the last reply."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from agentrl import Message, ToolCall
from agentrl.envs.gateway.same import Change, changes
from agentrl.envs.gateway.tree import ConversationTree, SampledReply
from agentrl.types import Image, Restart
from agentrl.types.seams import Seen, ToolSchema

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "number", "default": 2}, "c": {"type": "string"}}
TOOLS = (ToolSchema("add", "Add.", {"type": "object", "properties": PROPERTIES, "required": ["a"]}),)
SYSTEM, ASK = Message("system", "Be brief."), Message("user", "How many?")


def says(text="", *calls, reasoning=None):
    return Message("assistant", text, reasoning, tuple(calls))


def adds(arguments, id="c1", raw=None):
    return ToolCall("add", arguments, json.dumps(arguments) if raw is None else raw, id)


OURS = says("So.\n\nIt is", adds({"a": 1, "b": 3}), reasoning="Hm.")


@pytest.mark.parametrize(
    ("theirs", "kinds"),
    [
        (OURS, set()),
        (replace(OURS, content="  So. \n\nIt is\n"), {"white_space"}),
        (replace(OURS, content="So.\r\n\r\nIt is"), {"white_space"}),
        (replace(OURS, reasoning=None), {"reasoning"}),
        (replace(OURS, reasoning=" Hm. "), {"white_space"}),
        (replace(OURS, tool_calls=(adds({"a": 1, "b": 3}, raw='{"b":3,"a":1}'),)), {"arguments"}),
        (replace(OURS, tool_calls=(adds({"a": 1.0, "b": 3}),)), {"arguments"}),
        (replace(OURS, tool_calls=(adds({"a": 1, "b": 3, "c": None}),)), {"defaults"}),
        (replace(OURS, tool_calls=(adds({"a": 1, "b": 3}, id="x"),)), {"ids"}),
        (
            replace(OURS, content="So.\n\nIt is ", reasoning=None, tool_calls=(adds({"b": 3, "a": 1}, "x"),)),
            {"white_space", "reasoning", "arguments", "ids"},
        ),
        (replace(OURS, content="So. It is"), None),
        (replace(OURS, content="So."), None),
        (replace(OURS, reasoning="Ha."), None),
        (replace(OURS, tool_calls=()), None),
        (replace(OURS, tool_calls=(*OURS.tool_calls, adds({"a": 1}))), None),
        (replace(OURS, tool_calls=(replace(OURS.tool_calls[0], name="sub"),)), None),
        (replace(OURS, tool_calls=(adds({"a": True, "b": 3}),)), None),
        (replace(OURS, tool_calls=(adds({"a": 2, "b": 3}),)), None),
        (replace(OURS, tool_calls=(adds({"a": 1}),)), None),
        (replace(OURS, tool_calls=(adds({"a": 1, "b": 3, "c": "x"}),)), None),
        (Message("user", OURS.content), None),
    ],
)
def test_a_message_is_the_same_in_its_normal_form_and_in_no_other(theirs, kinds):
    found = changes(OURS, theirs, {}, TOOLS)
    assert (found and set(found.kinds)) == kinds
    assert kinds is None or kinds <= set(Change)


def test_a_default_may_be_added_and_left_out():
    for ours, theirs in (({"a": 1}, {"a": 1, "b": 2}), ({"a": 1, "b": 2.0}, {"a": 1})):
        found = changes(says("", adds(ours)), says("", adds(theirs)), {}, TOOLS)
        assert found is not None
        assert found.kinds == {"defaults"}


def test_an_unreadable_call_and_an_image_are_the_same_only_as_they_are():
    broken = ToolCall("add", None, "{", "c1", "broken")
    assert changes(says("", broken), says("", broken), {}, TOOLS)
    assert changes(says("", broken), says("", replace(broken, raw="{ ")), {}, TOOLS) is None
    image = Message("user", (Image.of(b"1"),))
    assert changes(image, image, {}, ()) is not None
    assert changes(image, Message("user", (Image.of(b"2"),)), {}, ()) is None


def reply_of(place, message, number=1):
    """A reply after a request, which the tree has from then on."""
    ids = {each.id: f"call_{index}" for index, each in enumerate(message.tool_calls)}
    calls = tuple(replace(each, id=ids[each.id]) for each in message.tool_calls)
    action = replace(message, tool_calls=calls)
    seen = Seen((*place.messages, action), TOOLS, (), ())
    reply = SampledReply(number, action, message, ids, seen, None, place.continued, place.reason)
    place.end.add(message, reply)
    return reply


def test_results_follow_the_calls_that_their_client_has_renamed():
    tree = ConversationTree()
    sent = says("", adds({"a": 1}, "s1"), adds({"a": 2}, "s2"))
    reply = reply_of(tree.place((SYSTEM, ASK), TOOLS), sent)
    theirs = says("", adds({"a": 1}, "own1"), adds({"a": 2}, "own2"))
    results = [Message("tool", text, tool_call_id=id) for text, id in (("4", "own2"), ("3", "own1"))]
    place = tree.place((SYSTEM, ASK, theirs, *results), TOOLS)
    assert place.continued is reply
    assert place.changed == {"ids": 1}
    assert [m.tool_call_id for m in place.new] == ["call_1", "call_0"]
    assert [m.tool_calls for m in place.messages if m.role == "assistant"] == [reply.action.tool_calls]
    # A change is counted once, however often the message is sent.
    second = reply_of(place, says("7"), 2)
    again = tree.place((SYSTEM, ASK, theirs, *results, says("7"), Message("user", "Sure?")), TOOLS)
    assert (again.continued, again.changed) == (second, {})
    # Results of other calls are another conversation.
    swapped = [replace(m, tool_call_id=id) for m, id in zip(results, ("own1", "own2"), strict=True)]
    assert tree.place((SYSTEM, ASK, theirs, *swapped), TOOLS).continued is reply


LOOK = Message("user", "Look.")


@pytest.mark.parametrize(
    ("messages", "reason", "continues"),
    [
        ((Message("system", "Other."), ASK), Restart.SUB_AGENT, None),
        ((SYSTEM, Message("user", "Other?")), Restart.SUB_AGENT, None),
        ((ASK,), Restart.SUB_AGENT, None),
        ((Message("system", f"{SYSTEM.text} And polite."), ASK), Restart.SUB_AGENT, None),
        ((SYSTEM, Message("user", f"{ASK.text}\nYou found 1.")), Restart.REWRITTEN, None),
        ((SYSTEM, ASK), Restart.PARALLEL, None),
        ((SYSTEM, ASK, says("1"), LOOK), Restart.PARALLEL, 1),
        ((SYSTEM, ASK, says("1"), Message("user", "Other."), says("2"), LOOK), Restart.PARALLEL, 1),
        ((SYSTEM, ASK, Message("user", "Before: all.")), Restart.COMPACTED, None),
        ((SYSTEM, ASK, says("1"), Message("user", "Before.")), Restart.COMPACTED, 1),
        ((SYSTEM, ASK, says("9"), LOOK, says("2"), LOOK, LOOK), Restart.REWRITTEN, None),
    ],
)
def test_a_conversation_that_does_not_go_on_has_a_reason(messages, reason, continues):
    tree = ConversationTree()
    first = reply_of(tree.place((SYSTEM, ASK), ()), says("1"), 1)
    second = reply_of(tree.place((SYSTEM, ASK, says("1"), LOOK), ()), says("2"), 2)
    reply_of(tree.place((SYSTEM, ASK, says("1"), LOOK, says("2"), LOOK), ()), says("3"), 3)
    place = tree.place(messages, ())
    assert (place.reason, place.continued) == (reason, {None: None, 1: first, 2: second}[continues])


def brute_force(replies, messages):
    """The longest conversation with a reply that a request begins with, by comparing all of them."""
    fitting = [
        (len(before), number)
        for number, before in replies
        if messages[: len(before)] == before and len(messages) >= len(before)
    ]
    longest = max((length for length, _ in fitting), default=0)
    return {number for length, number in fitting if length == longest}


@pytest.mark.parametrize("seed", range(40))
def test_a_request_continues_what_a_comparison_with_all_conversations_finds(seed):
    rng = random.Random(seed)
    tree, replies, conversations = ConversationTree(), [], [()]
    for number in range(1, 60):
        before = rng.choice(conversations)
        if before and rng.random() < 0.2:
            before = before[: rng.randrange(len(before))]
        new = tuple(
            rng.choice((Message("user", rng.choice("ab")), says(rng.choice("ab"))))
            for _ in range(rng.randint(1, 2))
        )
        messages = (*before, *new)
        place = tree.place(messages, ())
        expected = brute_force(replies, messages)
        assert (place.continued.number in expected) if expected else place.continued is None
        assert place.messages == messages
        if rng.random() < 0.8:
            text = says(rng.choice("ab"))
            reply_of(place, text, number)
            replies.append((number, (*messages, text)))
            conversations.append((*messages, text))
