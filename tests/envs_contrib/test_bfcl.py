"""BFCL's conversations: paid as the benchmark's own checker pays them, whatever is called."""

from __future__ import annotations

import random
import sys
from itertools import count

import pytest
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from agentrl import Message, ScriptedAgent, ToolRejected, UserError, call, play, say
from agentrl.types import Ending
from envs_contrib.bfcl.data import CATEGORIES, Call, entries
from envs_contrib.bfcl.env import BFCL
from envs_contrib.bfcl.world import Systems

NUM = count()
"""The benchmark keeps its systems by the name of a model."""
WRONG_ORDER = "multi_turn_miss_func_49"
"""Its right calls need a function before that is on offer."""


async def reward_of(category, id, script):
    env = BFCL(category)
    (task,) = [task for task in env.tasks("test") if task.id == id]
    episode = await play(env, ScriptedAgent(script(env, task)), task)
    assert episode.failure is None
    return episode.total_of()


def changed(turns, rng):
    """The right calls with one left out, made twice, moved to another turn, or with another argument."""
    turns = [list(calls) for calls in turns]
    number = rng.choice([number for number, calls in enumerate(turns) if calls])
    place = rng.randrange(len(turns[number]))
    name, arguments = turns[number][place]
    match rng.choice(["without", "twice", "later", "other", "none"]):
        case "without":
            del turns[number][place]
        case "twice":
            turns[number].insert(place, turns[number][place])
        case "later":
            turns[-1].append(turns[number].pop(place))
        case "other" if arguments:
            key = rng.choice(sorted(arguments))
            turns[number][place] = Call(name, {**arguments, key: rng.choice(["x", 3, None, [1], ["x"]])})
    return turns


def said(turns):
    for calls in turns:
        for name, arguments in calls:
            yield call(name, **arguments)
        yield say("Done.")


def by_the_benchmark(category, id, turns):
    """1.0 or 0.0, by its own checker from the text of the calls."""
    entry = entries(category)[id]
    texts = [
        [[f"{name}({', '.join(f'{k}={v!r}' for k, v in a.items())})"] for name, a in calls] for calls in turns
    ]
    right = [
        [f"{name}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for name, a in calls]
        for calls in entry.right
    ]
    of_theirs = {"id": id, "initial_config": entry.scenario, "involved_classes": list(entry.classes)}
    model = f"model{next(NUM)}"
    return float(multi_turn_checker(texts, right, of_theirs, f"multi_turn_{category}", model)["valid"])


def chosen(category, every):
    return [id for number, id in enumerate(entries(category)) if number % every == 7 and id != WRONG_ORDER]


async def check_paid_alike(category, every):
    paid = []
    for id in chosen(category, every):
        rng = random.Random(id)
        turns = changed(entries(category)[id].right, rng)
        if max(map(len, turns)) > 20:
            continue
        late = entries(category)[id].late
        hidden = {name for turn, names in late.items() for name in names}
        if any(name in hidden for calls in turns[: min(late, default=0)] for name, _ in calls):
            continue
        reward = await reward_of(category, id, lambda env, task, turns=turns: said(turns))
        assert reward == by_the_benchmark(category, id, turns), (id, turns)
        paid.append(reward)
    assert {0.0, 1.0} <= {*paid}


@pytest.mark.parametrize("category", CATEGORIES)
async def test_wrong_and_right_calls_are_paid_as_by_the_benchmark(category):
    await check_paid_alike(category, 13)


@pytest.mark.full
@pytest.mark.parametrize("category", CATEGORIES)
async def test_wrong_and_right_calls_of_all_are_paid_as_by_the_benchmark(category):
    for every in (8, 9, 10, 11):
        await check_paid_alike(category, every)


@pytest.mark.parametrize("category", CATEGORIES)
async def test_the_right_calls_are_paid_and_silence_is_not(category):
    ids = chosen(category, 20)
    assert [await reward_of(category, id, BFCL.expert) for id in ids] == [1.0] * len(ids)
    silence = [await reward_of(category, id, lambda env, task: (say("Done.") for _ in count())) for id in ids]
    assert silence == [0.0] * len(ids)


async def test_a_function_that_is_on_offer_later_is_unknown_before():
    id = "multi_turn_miss_func_0"
    entry = entries("miss_func")[id]
    (turn, names), offered = next(iter(entry.late.items())), []

    def script(env, task):
        for calls in entry.right[:turn]:
            offered.append({tool.name for tool in env.tool_schemas})
            for name, arguments in calls:
                yield call(name, **arguments)
            said_next = yield say("Done.")
        assert said_next == "I have updated some more functions you can choose from. What about now?"
        offered.append({tool.name for tool in env.tool_schemas})
        yield from said(entry.right[turn:])

    assert await reward_of("miss_func", id, script) == 1.0
    assert not offered[0] & {*names}
    assert offered[-1] - offered[0] == {*names}


async def test_an_episode_ends_with_the_first_wrong_turn_and_counts_the_right_ones():
    env = BFCL("base")
    task = env.tasks("test")[0]
    first = entries("base")[task.id].right[0]
    script = (
        *(call(name, **arguments) for name, arguments in first),
        say("Done."),
        say("Done."),
        say("Done."),
    )
    episode = await play(env, ScriptedAgent(iter(script)), task)
    assert (episode.total_of(), episode.counts["turns"], len(episode.turns)) == (0.0, 1, len(first) + 2)


async def test_the_twenty_first_turn_with_calls_ends_the_episode():
    env = BFCL("base")
    task = env.tasks("test")[0]
    episode = await play(env, ScriptedAgent(call("pwd") for _ in count()), task)
    assert (episode.ending, episode.total_of(), len(episode.turns)) == (Ending.COMPLETED, 0.0, 21)


def test_what_would_take_gigabytes_is_refused():
    entry = next(entry for entry in entries("base").values() if "MathAPI" in entry.classes)
    systems = Systems(entry)
    for name, arguments in (
        ("power", {"base": 10, "exponent": 10**9}),
        ("square_root", {"number": 2, "precision": 10**12}),
        ("sum_values", {"numbers": [1, 10**4000]}),
    ):
        with pytest.raises(ToolRejected, match="is at most"):
            systems.call(Call(name, arguments))
    assert systems.call(Call("power", {"base": 2, "exponent": 10})) == '{"result": 1024}'


def test_held_out_conversations_are_no_training_data():
    env = BFCL("base", held_out=4)
    train, test = ([task.id for task in env.tasks(split)] for split in ("train", "test"))
    assert (len(train), len(test), {*train} & {*test}) == (150, 50, set())


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [({"category": "bases"}, "no category"), ({"category": "base", "held_out": 1}, "held_out")],
)
def test_wrong_arguments_are_refused(kwargs, says):
    with pytest.raises(UserError, match=says):
        BFCL(**kwargs)


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    entries.cache_clear()
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(UserError, match="pip install --no-deps bfcl-eval"):
        BFCL("base").tasks("test")
    monkeypatch.undo()
    assert len(BFCL("base").tasks("test")) == 200


def test_several_calls_of_a_turn_count_as_one():
    id = next(id for id, entry in entries("long_context").items() if max(map(len, entry.right)) > 20)
    script = BFCL("long_context").expert(
        BFCL("long_context").tasks("test")[[*entries("long_context")].index(id)]
    )
    actions = [*script]
    assert all(isinstance(action, Message) for action in actions)
    assert max(len(action.tool_calls) for action in actions) == 2
