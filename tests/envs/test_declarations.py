"""Attributes, methods and tasks of environments in the forms in which authors write them."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence

import pytest

from agentrl import (
    Chat,
    Env,
    Limits,
    MultiAgentEnv,
    ScriptedAgent,
    SingleTurnEnv,
    Task,
    ToolEnv,
    UserError,
    call,
    make,
    play,
    register,
    tool,
)
from agentrl.envs import tasks_of
from agentrl.envs.base import corpus_of
from agentrl.errors import EnvCodeError, StageError
from tests.worlds import ASK


class Plain(ToolEnv):
    """Without a tool; the right answer is worth 1."""

    def tasks(self, split):
        return [ASK]

    def reward(self, task, answer):
        return float(answer == task.answer)


@tool(inline=True)
def look(item: str) -> dict[str, object]:
    """Look at an item."""
    return {"item": item, "number": 3}


def subclass(base=Plain, **attributes):
    """A class with these attributes, as the statement `class` makes it."""
    return type("Mine", (base,), attributes)


@pytest.mark.parametrize(
    ("name", "form", "meaning"),
    [
        ("limits", {"max_turns": 3}, Limits(max_turns=3)),
        ("limits", {}, Limits()),
        ("splits", "train", ("train",)),
        ("splits", ["train", "dev"], ["train", "dev"]),
        ("needs", "mcp", ("mcp",)),
        ("dialect", Chat, Chat()),
        ("tools", look, (look,)),
    ],
)
def test_a_form_with_one_meaning_is_converted(name, form, meaning):
    assert getattr(subclass(**{name: form})(), name) == meaning


@pytest.mark.parametrize(
    ("name", "form", "sentence"),
    [
        ("limits", {"max_turn": 3}, r"`limits` has no limit 'max_turn'. Did you mean `max_turns`\?"),
        ("limits", {"max_turns": 0}, "`limits` is wrong: max_turns must be above 0, got 0"),
        ("limits", Limits, r"`limits` is <class .*Limits'> \(type\); write limits = Limits\(max_turns=4\)"),
        ("limits", None, r"`limits` is None \(NoneType\)"),
        ("splits", {"train"}, r"`splits` is {'train'} \(set\); write a tuple of names"),
        ("splits", (1, 2), "`splits` is .* write a tuple of names"),
        ("dialect", "chat", r"`dialect` is 'chat' \(str\); write dialect = Chat\(\)"),
        ("tools", "look", r"`tools` is 'look' \(str\); write a tuple of functions"),
        ("tools", {look}, r"`tools` is {.*} \(set\); write a tuple of functions"),
    ],
)
def test_any_other_form_is_refused_when_the_class_is_made(name, form, sentence):
    with pytest.raises(UserError, match=f"^Mine: {sentence}"):
        subclass(**{name: form})


def test_a_name_is_one_agent():
    class Alone(MultiAgentEnv):
        possible_agents = "player"

        def tasks(self, split):
            return []

        def reset(self, task, *, seed):
            return {}, {}

        def step(self, actions):
            return {}, 1.0, True, False, {}

    assert Alone().possible_agents == ("player",)


@pytest.mark.parametrize(
    ("base", "name", "method", "sentence"),
    [
        (Plain, "tasks", lambda self: [], r"`tasks\(self\)` takes other arguments .* `tasks\(self, split\)`"),
        (Plain, "reward", lambda self, answer: 1.0, r"write `reward\(self, task, answer\)`"),
        (SingleTurnEnv, "grade", lambda self, answer: 1.0, r"write `grade\(self, task, answer\)`"),
        (
            Env,
            "reset",
            lambda self, seed=None, options=None: None,
            r"`reset\(self, seed=None, options=None\)` .* write `reset\(self, task, \*, seed\)`",
        ),
        (Env, "step", lambda self: None, r"write `step\(self, action\)`"),
        (Env, "expert", lambda self, task, rng: None, r"write `expert\(self, task\)`"),
        (MultiAgentEnv, "expert", lambda self, task: None, r"write `expert\(self, task, agent, prompt\)`"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_when_the_class_is_made(base, name, method, sentence):
    with pytest.raises(UserError, match=sentence):
        subclass(base, **{name: method})


def test_more_arguments_with_defaults_and_other_names_are_fine():
    subclass(tasks=lambda self, part, shuffled=True: [], reward=lambda self, *arguments: 1.0)


@pytest.mark.parametrize("is_generator", [True, False])
def test_async_tasks_are_refused(is_generator):
    async def coroutine(self, split):
        return []

    async def generator(self, split):
        yield ASK

    with pytest.raises(UserError, match=r"`tasks` is async; write `def tasks\(self, split\)` without async"):
        subclass(tasks=generator if is_generator else coroutine)


def tasks_from(tasks):
    return subclass(tasks=lambda self, split: tasks())()


@pytest.mark.parametrize(
    "make_tasks", [lambda: [ASK], lambda: (ASK,), lambda: iter([ASK]), lambda: map(str, ())]
)
def test_tasks_may_be_any_iterable(make_tasks):
    tasks = tasks_of(tasks_from(make_tasks), "train")
    assert [*tasks] in ([ASK], [])
    assert len(tasks) <= 1


def test_a_sequence_that_makes_its_tasks_when_they_are_read_is_not_read():
    class Numbered(Sequence):
        def __init__(self):
            self.reads = []

        def __len__(self):
            return 10**9

        def __getitem__(self, number):
            self.reads.append(number)
            return Task.ask(number, "?")

    tasks = Numbered()
    assert tasks_of(tasks_from(lambda: tasks), "train") is tasks
    assert tasks.reads == [0]


@pytest.mark.parametrize(
    ("make_tasks", "sentence"),
    [
        (lambda: None, "Mine: `tasks` returned None (NoneType); return a list of Tasks, or yield them."),
        (lambda: "one", "Mine: `tasks` returned 'one' (str); return a list of Tasks, or yield them."),
        (lambda: {"one": ASK}, "(dict); return a list of Tasks, or yield them."),
        (lambda: ["one"], "Mine: `tasks` holds 'one' (str), which is no Task; write Task.ask("),
        (lambda: [ASK, {"prompt": "x"}], "`tasks` holds {'prompt': 'x'} (dict), which is no Task"),
        (
            lambda: [Task.ask("a", "?", answer=5)],
            "the answer of task `a` is 5 (int); the answer of a model is",
        ),
        (lambda: {}["gone"], "`tasks` failed in test_declarations.py, line "),
        (lambda: sys.exit(3), "exit() was called, SystemExit: 3"),
    ],
)
def test_what_is_no_list_of_tasks_is_one_sentence(make_tasks, sentence):
    with pytest.raises(EnvCodeError) as refused:
        tasks_of(tasks_from(make_tasks), "train")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, UserError)
    assert (refused.value.stage, isinstance(refused.value, StageError)) == ("tasks", True)


def test_the_corpus_of_yielded_tasks_is_their_text():
    assert [*tasks_from(lambda: iter([ASK])).corpus()] == ["How many?", "3"]


@pytest.mark.parametrize(
    ("make_corpus", "sentence"),
    [
        (lambda: "rivets and bolts", "Mine: `corpus` returned 'rivets and bolts' (str); return a list of"),
        (lambda: None, "Mine: `corpus` returned None (NoneType); return a list of texts, or yield them."),
        (lambda: {"rivets": 1}, "(dict); return a list of texts, or yield them."),
        (lambda: ["rivets", 3], "Mine: `corpus` holds 3 (int), which is no text; write strings."),
        (lambda: iter([ASK]), "which is no text; write strings."),
        (lambda: {}["gone"], "Mine: `corpus` failed in test_declarations.py, line "),
    ],
)
def test_what_is_no_list_of_texts_is_one_sentence(make_corpus, sentence):
    env = subclass(corpus=lambda self: make_corpus())()
    with pytest.raises(EnvCodeError) as refused:
        list(corpus_of(env))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (refused.value.stage, isinstance(refused.value, UserError)) == ("corpus", True)


async def played(env):
    return await play(env, ScriptedAgent([call("look", item="x"), "3"]), ASK)


class Unprepared(Plain):
    """An `__init__` without `super().__init__()`, which sets what the class may declare."""

    def __init__(self, turns=2):
        self.turns = turns
        self.tools = [self.see]
        self.limits = {"max_turns": turns}

    @tool(name="look", inline=True)
    def see(self, item: str) -> list[str]:
        """Look at an item."""
        return [item] * self.turns


class Late(Unprepared):
    """Sets its tools after `super().__init__()` of the package."""

    def __init__(self):
        Plain.__init__(self)
        super().__init__(turns=2)


@dataclasses.dataclass
class Sized(Plain):
    """A dataclass, whose `__init__` calls no other."""

    size: int = 2
    tools = (look,)


@pytest.mark.parametrize(
    ("env_class", "result"),
    [(Unprepared, '["x", "x"]'), (Late, '["x", "x"]'), (Sized, '{"item": "x", "number": 3}')],
)
async def test_an_init_without_super_works(env_class, result):
    episode = await played(env_class())
    assert episode.failure is None
    assert episode.turns[1].observation[0].text == result
    assert episode.step_rewards == (None, 1.0)
    assert episode.counts["tool_calls"] == 1
    assert [schema.name for schema in env_class().tool_schemas] == ["look"]


def test_limits_that_an_init_sets_are_converted():
    register("Unprepared-v0", Unprepared)
    assert make("Unprepared-v0", turns=1).limits == Limits(max_turns=1)
    assert asyncio.run(played(Unprepared(1))).ending == "truncated"


def test_an_init_that_fails_is_one_sentence_with_its_place():
    class Torn(Plain):
        def __init__(self):
            self.shelves = self.stock

    register("Torn-v0", Torn)
    with pytest.raises(EnvCodeError, match=r"^Torn-v0: `__init__` failed in test_declarations.py, line \d+ "):
        make("Torn-v0")
