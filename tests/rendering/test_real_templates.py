"""Conversations turn by turn against the published template of the model: token by token.

The right value is what transformers writes for the whole conversation with the real template. Turns of the
model are what that template writes for them, up to the first token that ends a turn.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import lru_cache

import pytest

from agentrl import Message, ToolCall
from agentrl.envs import Tags
from agentrl.errors import RenderingError, UserError
from agentrl.rendering.chat import FamilyRenderer
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template import TemplateRenderer
from agentrl.types import Restart
from agentrl.types.seams import Seen, Stops, ToolSchema
from tests.rendering.real_templates import FAMILIES, IN_PARTS, NAMES, THINKING, real_tokenizer

NUMBER = {"type": "integer", "description": "A number"}
TOOLS = (
    ToolSchema(
        "add",
        "Add <two> numbers & more.",
        {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    ),
    ToolSchema("find", "Find é.", {"type": "object", "properties": {"text": {"type": "string"}}}),
)
WITH_TOOLS = [*FAMILIES, "qwen2_5", THINKING]
# It writes the words of a turn with calls behind their results, where no model can have written them.
MOVES_WORDS = ("gemma4_v5",)
# Where a prompt opens every answer with an empty thought, the format keeps it in earlier turns.
KEEPS_EMPTY_THOUGHTS = ("qwen3_5_nothink",)
# They drop what a turn says besides its call.
ONE_CALL = ("llama3_1", "llama3_2")

EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


@lru_cache
def automatic(name):
    return chat_renderer(real_tokenizer(name))


def user(text):
    return Message("user", text)


def said(text="", *calls, thought=None):
    return Message("assistant", text, thought, calls)


def result(text, number=0, name="add"):
    return Message("tool", text, tool_call_id=f"call_{number}", name=name)


ADD = ToolCall("add", {"a": 12, "b": -30}, id="call_0")
FIND = ToolCall("find", {"text": 'a "b"\n<é>'}, id="call_0")
FOUND = result("x", name="find")
ANSWERS = {
    "answers": (user("Where?"), said("Tirak."), user("Why?"), said("So."), user("Oh?")),
    "a system's message": (Message("system", "Be brief."), user("Where?"), said("Tirak."), user("Why?")),
    "empty turns": (user("Add."), said(""), user(""), said("Yes."), user("So?")),
    "a thought, then none": (user("a?"), said("b.", thought="Hm."), user("c?"), said("d."), user("e?")),
}
CALLS = {
    "calls": (user("?"), said("", ADD), result("42"), said("So."), user("?"), said("", FIND), FOUND),
    "a call with words": (
        user("?"),
        said("I add.", ADD),
        result('{"r": [1]}'),
        said("", FIND),
        FOUND,
        said("So."),
        user("?"),
    ),
    "two calls in a turn": (
        *(user("?"), said("", ADD, ToolCall("find", {"text": "q"}, id="call_1"))),
        *(result("42"), result("x", 1, "find"), said("Done."), user("Again.")),
    ),
    "thoughts": (
        *(user("?"), said("", ADD, thought="Hm."), result("42"), said("It is.", thought="So.")),
        *(user("More?"), said("No.", thought="Why."), user("Oh?")),
    ),
    "thoughts between calls": (
        *(user("?"), said("I do.", ADD, thought="Hm."), result("42"), said("", FIND, thought="Then.")),
        *(FOUND, said("", ADD), result("42")),
    ),
    "an empty result": (user("?"), said("", ADD), result(""), said(""), user("So?")),
}


def as_dicts(name, messages):
    """Messages as transformers documents them."""
    dicts = []
    for message in messages:
        text = message.content
        plain = {
            "role": message.role,
            "content": [{"type": "text", "text": text}] if name in IN_PARTS else text,
        }
        if message.reasoning is not None:
            plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in message.tool_calls
            ]
        if message.role == "tool":
            plain |= {"tool_call_id": message.tool_call_id, "name": message.name}
        dicts.append(plain)
    return dicts


def whole(name, messages, tools, *, prompt=True):
    """The text of a conversation by the real template."""
    offered = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
        }
        for t in tools
    ]
    # The day that the template of Llama 3 shows by default.
    return real_tokenizer(name).apply_chat_template(
        as_dicts(name, messages),
        tools=offered or None,
        add_generation_prompt=prompt,
        tokenize=False,
        date_string="26 Jul 2024",
    )


def ids_of(name, text):
    return real_tokenizer(name).encode(text, add_special_tokens=False)


def sampled(name, before, turn, tools, stops, *, bare):
    """The turn as the template writes it, up to its end; bare: without its empty thought, if it has one."""
    prompt, text = whole(name, before, tools), whole(name, (*before, turn), tools, prompt=False)
    if text.startswith(prompt):
        written = text[len(prompt) :]
        written = EMPTY_THOUGHT.sub("", written, count=1) if bare else written
    else:
        # The prompt opens a thought, and the template writes the whole turn in another way.
        assert prompt.rstrip().endswith("<think>")
        assert text.startswith(prompt.rpartition("<think>")[0]) or not turn.content
        rest = whole(
            name, (*before, Message("assistant", turn.content, "", turn.tool_calls)), tools, prompt=False
        )
        start = len(prompt.rpartition("<think>")[0])
        rest = rest[start:].rpartition("</think>")[2].lstrip()
        written = f"{turn.reasoning or ''}\n</think>\n\n{rest}"
    ids = ids_of(name, written)
    ends = [n for n, token in enumerate(ids) if token in stops]
    if ends:
        return ids[: ends[0] + 1]
    # The token that begins the next message ends the turn.
    following = result("") if turn.tool_calls else user("")
    longer = ids_of(name, whole(name, (*before, turn, following), tools, prompt=False))
    return [*ids, [token for token in longer if token in stops][-1]]


def fields(message):
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.tool_calls]


def shown(turn, text):
    """What of a turn its text shows: some templates have no form for a thought, or for words with a call."""
    content = turn.content if turn.content in text else ""
    return Message(
        "assistant", content, turn.reasoning if (turn.reasoning or "") in text else None, turn.tool_calls
    )


def squeezed(text):
    return "".join(EMPTY_THOUGHT.sub("", text).split())


def play(name, messages, renderer, tools, *, bare=False):
    """Play a conversation and compare after every turn; returns the reasons of its restarts."""
    # The library takes an answer of GLM without its tags for a thought, as vLLM does.
    bare = bare and name != "glm4moe"
    stops, decode = renderer.stops(tools).token_ids, renderer.decode
    if whole(name, (user("?"),), tools).rstrip().endswith("</think>"):
        # Its prompt closes the thought.
        messages = tuple(replace(message, reasoning=None) for message in messages)
    if name in MOVES_WORDS:
        messages = tuple(replace(m, content="") if m.tool_calls else m for m in messages)
    turns = [n for n, message in enumerate(messages) if message.role == "assistant"]
    prefix = renderer.render(messages[: turns[0]], tools)
    assert decode(prefix) == whole(name, messages[: turns[0]], tools)
    assert prefix == ids_of(name, whole(name, messages[: turns[0]], tools))
    restarts = []
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        action = sampled(name, messages[:turn], messages[turn], tools, stops, bare=bare)
        parsed = renderer.parse(action, tools, prompt_ids=prefix)
        assert fields(parsed) == fields(shown(messages[turn], decode(action)))
        seen = Seen((*messages[:turn], parsed), tools, prefix, action)
        observation = messages[turn + 1 : following]
        added = renderer.extend(seen, observation, tools)
        text = whole(name, messages[:following], tools)
        expected, sofar = ids_of(name, text), [*prefix, *action]
        holds = expected[: len(sofar)] == sofar
        assert not (holds and isinstance(added, Restart)), f"{added} though nothing is taken back"
        if isinstance(added, Restart):
            restarts.append(added)
            prefix = renderer.render(messages[:following], tools)
            assert decode(prefix) == text
        else:
            prefix = [*sofar, *added]
        if holds or isinstance(added, Restart):
            assert prefix == expected
        else:
            # What was sampled stays as it is: its blanks, and, until the next question, an empty thought.
            kept = observation[0].role == "tool" or name in KEEPS_EMPTY_THOUGHTS
            same = squeezed if kept else lambda text: "".join(text.split())
            assert same(decode(prefix)) == same(text)
    return restarts


@pytest.mark.parametrize("name", NAMES)
def test_the_inline_dialects_prompt_is_what_the_real_template_writes(name):
    prompt = InlineRenderer(real_tokenizer(name), Tags()).render((user("Where?"),), TOOLS)
    assert prompt == ids_of(name, whole(name, (user("Where?"),), ()))


@pytest.mark.parametrize("named", ["Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B", ""])
def test_a_name_is_no_proof_of_a_format(named):
    tokenizer = copy.deepcopy(real_tokenizer(THINKING))
    tokenizer.name_or_path = named
    prompt = chat_renderer(tokenizer).render((user("Where?"),), TOOLS)
    assert tokenizer.decode(prompt) == whole(THINKING, (user("Where?"),), TOOLS)
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("name", NAMES)
def test_auto_finds_the_family_whose_template_it_is(name):
    renderer = automatic(name)
    found = renderer._name if isinstance(renderer, FamilyRenderer) else None
    assert found == FAMILIES.get(name)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("name", [*NAMES, THINKING])
def test_answers_are_what_the_real_template_writes(name, case, bare):
    renderer = automatic(name)
    if name == "gemma" and ANSWERS[case][0].role == "system":
        with pytest.raises(RenderingError, match="System role not supported"):
            renderer.render(ANSWERS[case][:2], ())
        return
    play(name, ANSWERS[case], renderer, (), bare=bare)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("case", ANSWERS | CALLS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_turns_with_tools_are_what_the_real_template_writes(name, case, bare):
    renderer = automatic(name)
    if name in ONE_CALL and case == "two calls in a turn":
        with pytest.raises(RenderingError, match="single tool"):
            renderer.render(CALLS[case][:-1], TOOLS)
        return
    play(name, (ANSWERS | CALLS)[case], renderer, TOOLS, bare=bare)


@pytest.mark.parametrize("case", ANSWERS | CALLS)
@pytest.mark.parametrize(
    "name", ["llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"]
)
def test_the_template_form_does_the_same_as_the_family(name, case):
    if name in ONE_CALL and case == "two calls in a turn":
        return
    play(name, (ANSWERS | CALLS)[case], TemplateRenderer(real_tokenizer(name)), TOOLS)


OPEN_A_THOUGHT = {
    *("deepseek_r1_distill", "deepseekv3", "nemotron_3_5_lightning"),
    *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
}
"""By their prompt, and they write a turn without one otherwise than it begins."""


@pytest.mark.parametrize("form", [automatic, lambda name: TemplateRenderer(real_tokenizer(name))])
@pytest.mark.parametrize("name", sorted({*NAMES} - OPEN_A_THOUGHT))
def test_a_turn_that_a_stop_of_the_run_has_ended_is_closed_as_the_template_closes_it(name, form):
    """The environment reads a tag, and the model has not ended its turn."""
    if name == "glm4moe" and form is not automatic:
        with pytest.raises(UserError, match="ends a turn with no special token"):
            form(name)
        return
    renderer = copy.copy(form(name))
    renderer.more_stops = Stops(("</search>",), ())
    before, after = (user("Where?"),), (user("Found."),)
    turn = said("<search>Tirak</search>")
    prompt, text = whole(name, before, ()), whole(name, (*before, turn), (), prompt=False)
    assert text.startswith(prompt)
    written, tag, _ = text[len(prompt) :].partition("</search>")
    prefix, action = ids_of(name, prompt), ids_of(name, written + tag)
    parsed = renderer.parse(action, (), prompt_ids=prefix)
    assert parsed.content == turn.content
    added = renderer.extend(Seen((*before, parsed), (), prefix, action), after, ())
    expected, sofar = ids_of(name, whole(name, (*before, turn, *after), ())), [*prefix, *action]
    holds = expected[: len(sofar)] == sofar
    assert not (holds and isinstance(added, Restart)), added
    if not isinstance(added, Restart):
        assert squeezed(renderer.decode([*sofar, *added])) == squeezed(renderer.decode(expected))
        assert not holds or [*sofar, *added] == expected
