"""Text of a model that would hang the event loop: where it is parsed, and what becomes of it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from agentrl import Message, UserError, call
from agentrl.processes.forking import Workers
from agentrl.rendering import bounded
from agentrl.rendering.chat import FamilyRenderer, families
from agentrl.rendering.inline import InlineRenderer
from agentrl.tools import release_shared
from agentrl.types import Restart
from agentrl.types.seams import Seen, ToolSchema
from tests.rendering.families import FAMILY_TOKENS, family_renderer
from tests.rendering.subjects import CHATML, TAGGED_CALLS, renderer, tokenizer

LOOK = ToolSchema("look", "Look.", {"type": "object", "properties": {"at": {"type": "string"}}})
ASK = (Message("user", "Where?"),)
# Cubic in the number of line ends: 17 s.
HANGING = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json" + "\n" * 3000 + "x"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def sampled(subject, text):
    return subject._tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def deepseek():
    """A renderer whose own parser must not be called: only its copy in a worker may parse."""

    class OnTheLoop(FamilyRenderer):
        def parse(self, ids, tools, *, prompt_ids=()):
            raise AssertionError("parsed on the event loop")

        extend = render = parse

    return OnTheLoop(family_renderer("deepseek-v3")._tokenizer, "deepseek-v3")


async def test_long_text_is_handled_by_workers_which_are_ended_at_their_limit(deepseek, monkeypatch):
    original, ids = family_renderer("deepseek-v3"), sampled(deepseek, HANGING)
    monkeypatch.setattr(bounded, "_limit", lambda num_tokens: 0.3)
    message = await deepseek.bounded.parse(ids, (LOOK,))
    (wrong,) = message.tool_calls
    assert wrong.arguments is None
    assert wrong.error.startswith("The turn cannot be parsed in time; write a short call")
    assert len(wrong.error) < 250
    assert wrong.raw == original.decode(ids)

    # A worker that was ended is replaced; what it does is what the renderer does.
    honest = original.write(call("look", at="the sea " * 100), (LOOK,))
    assert await deepseek.bounded.parse(honest, (LOOK,)) == original.parse(honest, (LOOK,))
    seen = Seen((*ASK, message), (LOOK,), original.render(ASK, (LOOK,)), honest)
    observation = (Message("tool", "blue " * 5000, tool_call_id="call_0", name="look"),)
    assert await deepseek.bounded.extend(seen, observation, (LOOK,)) == original.extend(
        seen, observation, (LOOK,)
    )
    long = (Message("user", "Where? " * 5000),)
    assert await deepseek.bounded.render(long, (LOOK,)) == original.render(long, (LOOK,))
    await release_shared()


@pytest.mark.parametrize(("death", "restart"), [(bounded.Death(27), Restart.REWRITTEN)])
async def test_a_prefix_that_cannot_be_extended_in_time_is_rendered_again(
    deepseek, monkeypatch, death, restart
):
    async def late(*_):
        return death

    monkeypatch.setattr(deepseek.bounded, "_result", late)
    seen = Seen(ASK, (LOOK,), [1], sampled(deepseek, HANGING))
    assert await deepseek.bounded.extend(seen, ASK, (LOOK,)) is restart


async def test_a_worker_that_is_killed_from_outside_is_no_fault_of_the_text(deepseek, monkeypatch):
    replies = [bounded.Death(9), bounded.pickle.dumps(Message("assistant", "x"))]

    async def opened():
        workers = Workers([])
        monkeypatch.setattr(workers, "reply", replied)
        return workers

    async def replied(request, cpu_s):
        return replies.pop(0)

    monkeypatch.setattr(deepseek.bounded._workers, "get", opened)
    ids = sampled(deepseek, HANGING)
    assert await deepseek.bounded.parse(ids, (LOOK,)) == Message("assistant", "x")
    replies[:] = [bounded.Death(9), bounded.Death(9)]
    with pytest.raises(bounded.RenderingError, match="killed twice"):
        await deepseek.bounded.parse(ids, (LOOK,))


@pytest.mark.parametrize("family", families())
def test_only_short_text_is_parsed_on_the_loop(family):
    """Markers, their prefixes and their spelling in ordinary tokens count as the beginning of a call."""
    subject = family_renderer(family)
    is_short = subject.bounded._is_short
    for marker in FAMILY_TOKENS[family]:
        ids = sampled(subject, f"x{marker}" + "\n" * 400)
        ends = set(subject.stops(()).token_ids)
        assert not is_short(ids, ()) or ends & {*ids} or marker in bounded._REASONING
        assert not is_short(sampled(subject, "<" + marker[1:-1] + "\n" * 400), ())
    assert is_short(sampled(subject, "Where was Kalor born? " * 100), ())
    assert not is_short(sampled(subject, "a b " * 50_000), ())
    assert is_short(sampled(subject, "ab"), ())
    assert not is_short([10**6], ())
    with suppress(UserError, ValueError):  # some families cannot write a call
        action = call("look", at="the sea, far behind the hills and the woods")
        ids = subject.write(action, (LOOK,))
        assert is_short(ids, ()), "an ordinary call is parsed on the loop"


@pytest.mark.parametrize("form", ["template, tagged calls", "inline"])
async def test_an_ordinary_turn_starts_no_process(form, monkeypatch):
    subject = (
        InlineRenderer(tokenizer("byte-level", CHATML, "<|im_end|>", TAGGED_CALLS), bounded_tags())
        if form == "inline"
        else renderer(form, "byte-level")
    )
    monkeypatch.setattr(subject.bounded, "_result", None)
    ids = subject.write(call("look", at="it"), (LOOK,))
    prompt = await subject.bounded.render(ASK, (LOOK,))
    assert prompt == subject.render(ASK, (LOOK,))
    assert await subject.bounded.parse(ids, (LOOK,), prompt_ids=prompt) == subject.parse(
        ids, (LOOK,), prompt_ids=prompt
    )
    seen = Seen(ASK, (LOOK,), prompt, ids)
    answer = (Message("tool", "There.", tool_call_id="call_0", name="look"),)
    assert await subject.bounded.extend(seen, answer, (LOOK,)) == subject.extend(seen, answer, (LOOK,))
    with pytest.raises(TypeError):
        await subject.bounded.parse(ids * 1000, (LOOK,))


def bounded_tags():
    from agentrl.envs import Tags

    return Tags()
