"""Tools: the model's mistakes are text and counted, the world's are failures."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl import (
    Limits,
    Message,
    Tags,
    Task,
    ToolCall,
    ToolEnv,
    ToolRejected,
    UserError,
    call,
    say,
    tool,
)
from agentrl.errors import StageError, ToolDefinitionError
from tests.worlds import ASK, FOREVER_S, QUICK, Parrot, add, echo


async def started(env, seed=0):
    await env.reset(ASK, seed=seed)
    return env


def events(env):
    """All counts of an environment, those of tools by their names."""
    stats = env.tool_stats.items()
    return {
        **env.counts,
        **{f"tool/{name}/{what}": n for name, tool_stats in stats for what, n in tool_stats.events()},
    }


async def answers(env, action):
    step = await (await started(env)).step(action)
    assert not step.terminated
    assert not step.truncated
    assert step.reward is None
    return [message.content for message in step.observation]


async def test_reset_returns_the_complete_prompt_and_seeds_the_world():
    env = Parrot()
    observation, info = await env.reset(ASK, seed=7)
    assert observation == ASK.prompt
    assert info == {}
    again = await started(Parrot(), seed=7)
    other = await started(Parrot(), seed=8)
    first = env.rng.random()
    assert again.rng.random() == first
    assert other.rng.random() != first


async def test_a_call_is_answered_by_a_tool_message_that_names_it():
    env = await started(Parrot())
    step = await env.step(Message("assistant", tool_calls=(ToolCall("add", {"a": 2}, id="c1"),)))
    assert step.observation == (Message("tool", "3", tool_call_id="c1", name="add"),)


async def test_several_calls_are_answered_in_their_order():
    calls = call("echo", text="one").tool_calls + call("add", a=1, b=1).tool_calls
    assert await answers(Parrot(), Message("assistant", tool_calls=calls)) == ["one", "2"]


async def test_a_final_answer_is_rewarded_and_ends_the_episode():
    env = await started(Parrot())
    assert await env.step(say("3")) == ((), 1.0, True, False, {})
    assert (await env.step(say("4"))).reward == 0.0


@pytest.mark.parametrize(
    ("action", "sentence", "counted"),
    [
        (
            call("add", a="x"),
            "add: parameter `a` must be an integer, but got",
            {"rejected_calls": 1, "tool/add/calls": 1, "tool/add/rejected/type": 1},
        ),
        (
            call("add"),
            "parameter `a` is missing",
            {"rejected_calls": 1, "tool/add/calls": 1, "tool/add/rejected/required": 1},
        ),
        (
            call("add", a=1, c=2),
            "no parameter `c`",
            {"rejected_calls": 1, "tool/add/calls": 1, "tool/add/rejected/additionalProperties": 1},
        ),
        (call("ad", a=1), "There is no tool 'ad'; there are echo, add.", {"unknown_tools": 1}),
        (
            Message("assistant", tool_calls=(ToolCall("", None, "<ec", error="Write it so."),)),
            "Write it so.",
            {"malformed_calls": 1},
        ),
        (
            Message("assistant", tool_calls=(ToolCall("add", None, "<ad", error="Write it so."),)),
            "Write it so.",
            {"malformed_calls": 1, "tool/add/calls": 1, "tool/add/malformed": 1},
        ),
    ],
)
async def test_a_wrong_call_comes_back_as_one_sentence_and_is_counted(action, sentence, counted):
    env = Parrot()
    (text,) = await answers(env, action)
    assert sentence in text
    assert "\n" not in text
    assert events(env) == {"tool_calls": 1, **counted}


async def test_an_unknown_tool_with_an_endless_name_is_cut_in_the_sentence():
    (text,) = await answers(Parrot(), call("x" * 10_000))
    assert len(text) < 120


async def test_a_refusal_by_a_tool_is_text_and_counted():
    @tool(inline=True)
    def shy(q: str) -> str:
        """Say no."""
        raise ToolRejected(f"{q} is too private.")

    class Shy(Parrot):
        tools = (shy,)

    env = Shy()
    assert await answers(env, call("shy", q="that")) == ["that is too private."]
    assert events(env) == {
        "tool_calls": 1,
        "rejected_calls": 1,
        "tool/shy/calls": 1,
        "tool/shy/rejected/tool": 1,
    }


@pytest.mark.parametrize("inline", [False, True])
async def test_a_tool_that_breaks_is_the_worlds_failure(inline):
    @tool(inline=inline)
    def broken(q: str) -> str:
        """Break."""
        raise ConnectionError("index offline")

    class Broken(Parrot):
        tools = (broken,)

    with pytest.raises(StageError) as caught:
        await answers(Broken(), call("broken", q="x"))
    assert (caught.value.stage, caught.value.kind) == ("tool", "error")
    assert "index offline" in caught.value.detail


async def test_a_tools_own_timeout_error_is_the_worlds_failure_not_the_models_overrun():
    async def remote(q: str) -> str:
        """Ask far away."""
        raise TimeoutError("the server did not answer")

    class Remote(Parrot):
        tools = (remote,)

    with pytest.raises(StageError) as caught:
        await answers(Remote(), call("remote", q="x"))
    assert (caught.value.stage, caught.value.kind) == ("tool", "error")


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_tool_that_overruns_is_text_for_the_model_and_counted(kind):
    async def wait(q: str) -> str:
        """Wait."""
        await asyncio.sleep(FOREVER_S)
        return q

    def block(q: str) -> str:
        """Block a thread."""
        time.sleep(0.3)
        return q

    class Slow(Parrot):
        tools = (wait, block)
        limits = Limits(tool_timeout_s=0.02)

    env = Slow()
    name = "wait" if kind == "async" else "block"
    began = time.perf_counter()
    assert await answers(env, call(name, q="x")) == [f"{name} was stopped: it took longer than 0.02 s."]
    assert time.perf_counter() - began < 0.25
    counted = {"tool_timeouts": 1, f"tool/{name}/calls": 1, f"tool/{name}/timeouts": 1}
    assert events(env) == {"tool_calls": 1, **counted}
    assert 0.02 <= env.tool_stats[name].seconds < 0.25


@pytest.mark.parametrize(
    ("policy", "sentence", "what"), [("strict", "but got", "rejected/type"), ("coerce", "5", "coerced")]
)
async def test_the_policy_of_the_world_decides_whether_a_call_is_mended(policy, sentence, what):
    class Adding(Parrot):
        arguments = policy

    env = Adding()
    assert sentence in (await answers(env, call("add", a="3", b=[] if policy == "strict" else "2")))[0]
    assert events(env)[f"tool/add/{what}"] == 1


def test_a_policy_that_is_none_is_refused():
    class Lenient(Parrot):
        arguments = "lenient"

    with pytest.raises(ToolDefinitionError, match="`arguments` is 'lenient'; write `strict` or `coerce`"):
        Lenient()


@pytest.mark.parametrize(("most", "kept", "cut"), [(5, 5, 1), (10, 10, 0), (9, 9, 1), (None, 10, 0)])
async def test_a_huge_answer_of_a_tool_is_cut_visibly(most, kept, cut):
    class Short(Parrot):
        limits = Limits(max_tool_chars=most)

    env = Short()
    (text,) = await answers(env, call("echo", text="0123456789"))
    notice = f"\n... truncated: {10 - kept} of 10 characters are left out." if cut else ""
    assert text == "0123456789"[:kept] + notice
    assert events(env).get("tool/echo/truncated", 0) == cut


async def test_the_text_of_a_refusal_is_bounded_too():
    @tool(inline=True)
    def shy(q: str) -> str:
        """Say no."""
        raise ToolRejected("no" * 50_000)

    class Shy(Parrot):
        tools = (shy,)

    (text,) = await answers(Shy(), call("shy", q="x"))
    assert text.endswith("\n... truncated: 80,000 of 100,000 characters are left out.")
    assert len(text) < 20_100


async def test_the_time_of_a_tool_is_summed_over_its_calls():
    async def nap(q: str) -> str:
        """Sleep."""
        await asyncio.sleep(0.02)
        return q

    class Napping(Parrot):
        tools = (nap, echo)

    env = Napping()
    for _ in range(3):
        await answers(env, call("nap", q="x"))
    assert 0.06 <= env.tool_stats["nap"].seconds < 0.5
    assert env.tool_stats["nap"].calls == 3


async def test_a_method_is_a_tool_that_sees_its_episode():
    class Counter(Parrot):
        def bump(self, by: int) -> str:
            """Count on."""
            self.total = getattr(self, "total", 0) + by
            return f"{self.task.id}: {self.total}"

        tools = (echo, bump)

    env = await started(Counter())
    assert [schema.name for schema in env.tool_schemas] == ["echo", "bump"]
    assert "self" not in env.tool_schemas[1].parameters["properties"]
    await env.step(call("bump", by=2))
    assert (await env.step(call("bump", by=3))).observation[0].content == "ask: 5"
    assert (await (await started(Counter())).step(call("bump", by=1))).observation[0].content == "ask: 1"


async def test_a_subclass_may_override_a_method_that_is_a_tool():
    class Base(Parrot):
        def look(self, q: str) -> str:
            """Look it up."""
            return "base"

        tools = (look,)

    class Below(Base):
        def look(self, q: str) -> str:
            """Look it up elsewhere."""
            return "below"

    assert await answers(Below(), call("look", q="x")) == ["below"]


async def test_a_step_before_reset_is_named():
    with pytest.raises(StageError, match="before reset"):
        await Parrot().step(say("x"))


def test_a_tool_without_type_hints_is_refused_when_the_world_is_made():
    def untyped(q):
        """Look."""
        return q

    class Untyped(Parrot):
        tools = (untyped,)

    with pytest.raises(ToolDefinitionError, match=r"parameter `q` has no type hint; write `q: str`"):
        Untyped()


def test_two_tools_of_one_name_are_refused():
    @tool(name="echo")
    def other(q: str) -> str:
        """Another."""
        return q

    class Twice(Parrot):
        tools = (echo, other)

    with pytest.raises(ToolDefinitionError, match="`echo` names two things"):
        Twice()


@pytest.mark.parametrize("name", ["answer", "facts"])
def test_a_tool_named_like_a_tag_of_the_dialect_is_refused(name):
    @tool(name=name)
    def clash(q: str) -> str:
        """Clash."""
        return q

    class Clash(Parrot):
        dialect = Tags(result="facts")
        tools = (clash,)

    with pytest.raises(ToolDefinitionError, match=f"`{name}` names two things"):
        Clash()


def test_every_episode_counts_for_itself():
    first, second = Parrot(), Parrot()
    first.counts["tool_calls"] += 1
    assert second.counts == {}


def test_a_world_without_an_expert_raises_with_the_method_to_write():
    with pytest.raises(UserError, match=r"Parrot-v0 has no expert; write its `expert\(task\)` method"):
        Parrot().expert(ASK)


def test_by_default_the_demonstrator_is_the_expert_and_the_corpus_the_tasks():
    class Taught(Parrot):
        def expert(self, task):
            yield say(task.answer)

    assert next(Taught().demonstrator(ASK, None)) == say("3")
    assert list(Parrot().corpus())[:2] == ["How many are 0 and 1?", "1"]


def test_a_tool_env_needs_tasks_and_a_reward():
    class Half(ToolEnv):
        tools = (add,)
        limits = QUICK

        def tasks(self, split):
            return [Task.ask("t", "?")]

    with pytest.raises(TypeError, match="reward"):
        Half()
