"""How long text holds the event loop: a search for bad cases over every family and dialect.

Repetitions of every marker of a family, of its prefixes and suffixes, and of what parsers skip around them.
"""

from __future__ import annotations

import itertools
import time

import pytest

from agentrl import Message
from agentrl.envs import Tags
from agentrl.rendering import bounded
from agentrl.rendering.chat import families
from agentrl.rendering.inline import InlineRenderer
from agentrl.tools import release_shared
from agentrl.types.seams import Seen, ToolSchema
from tests.rendering.families import FAMILY_TOKENS, family_renderer
from tests.rendering.subjects import CHATML, TAGGED_CALLS, renderer, tokenizer

pytestmark = pytest.mark.full

HOLD_S = 0.05
CHARACTERS = 200_000
TOOLS = (ToolSchema("look", "Look.", {"type": "object", "properties": {"at": {"type": "string"}}}),)
# Text of the grammars that is no special token.
WRITTEN = ("<think>", "</think>", "<function=look>", "<parameter=at>", "</parameter>", "</function>")
WRITTEN += ('<invoke name="look">', "</invoke>", '<parameter name="at">', "<arg_key>", "</arg_key>")
WRITTEN += ("<arg_value>", "</arg_value>", "```json", "\n", " ", "{", "[", '"', "<|tool_call_begin|>")
WRITTEN += ("<|tool_calls_section_begin|>", '<｜DSML｜invoke name="look">\n', '<｜DSML｜parameter name="at"')
DIALECTS = {
    **{family: lambda family=family: family_renderer(family) for family in families()},
    "template": lambda: renderer("template, tagged calls", "byte-level"),
    "template without delimiters": lambda: renderer("template, undelimited calls", "byte-level"),
    "inline": lambda: InlineRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", TAGGED_CALLS), Tags()),
}


def attacks(markers):
    """Texts of two or three lengths: markers, then one part again and again, then a marker."""
    parts = [*markers, *WRITTEN, *(m[: len(m) // 2] for m in markers), *(m[len(m) // 2 :] for m in markers)]
    openings = ["", *("".join(pair) for pair in itertools.permutations(markers[:12], 2))]
    for number, part in enumerate(parts):
        opening = openings[number % len(openings)]
        closing = markers[-1 - number % len(markers)] if markers else ""
        for length in (350, 15_000, CHARACTERS)[: 3 if number % 5 == 0 else 2]:
            room = length - len(opening) - len(closing)
            yield opening + part * (room // len(part)) + closing


async def held(work):
    """A bound on the longest hold: all CPU seconds of the loop's thread until the work is done."""
    began = time.thread_time()
    result = await work
    return time.thread_time() - began, result


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_text_holds_the_loop(dialect, monkeypatch):
    monkeypatch.setattr(bounded, "_limit", lambda num_tokens: 0.05)
    subject = DIALECTS[dialect]()
    markers = FAMILY_TOKENS[dialect] if dialect in families() else CHATML
    encode = subject._tokenizer.encode
    question = (Message("user", "Where?"),)
    prompt = subject.render(question, TOOLS)
    worst = (0.0, "", "")
    for text in attacks(list(markers)):
        ids = encode(text, add_special_tokens=False)
        seconds, message = await held(subject.bounded.parse(ids, TOOLS, prompt_ids=prompt))
        assert message.role == "assistant"
        worst = max(worst, (seconds, "parse", text[:80]))
        seen = Seen((*question, message), TOOLS, prompt, ids)
        answer = (Message("tool", "There.", tool_call_id="call_0", name="look"),)
        seconds, _ = await held(subject.bounded.extend(seen, answer, TOOLS))
        worst = max(worst, (seconds, "extend", text[:80]))
        if len(text) > 100_000:
            further = Message("user", "Go on.")
            seconds, _ = await held(subject.bounded.render((*question, message, further), TOOLS))
            worst = max(worst, (seconds, "render", text[:80]))
    await release_shared()
    assert worst[0] <= HOLD_S, worst
