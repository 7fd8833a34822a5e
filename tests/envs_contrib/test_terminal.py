"""Terminal: the planted bugs, the grader, and attacks on both. Every command really runs."""

from __future__ import annotations

import json
import types
from collections import Counter

import pytest
import pytest_asyncio

from agentrl import Message, ScriptedAgent, UserError, call, play, say
from agentrl.tools import release_shared
from agentrl.types import Ending
from envs_contrib.terminal import Terminal
from envs_contrib.terminal.bugs import BUGS
from envs_contrib.terminal.cases import VISIBLE
from envs_contrib.terminal.env import passes
from envs_contrib.terminal.inside import outcome
from envs_contrib.terminal.repositories import outcomes, repository, source

ALL_BUGS = [(module, number) for module, bugs in BUGS.items() for number in range(len(bugs))]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _released():
    """One sandbox for all tests: the event loop of the module has it."""
    yield
    await release_shared()


def outcomes_of(text: str, cases) -> list[str]:
    """The outcomes of the functions of a module's text."""
    module = types.ModuleType("broken")
    exec(compile(text, "broken", "exec"), module.__dict__)
    return [outcome(getattr(module, name), json.loads(json.dumps(args))) for name, args in cases]


@pytest.mark.parametrize(("module", "number"), ALL_BUGS)
async def test_every_bug_fails_visible_tests_and_hidden_ones_that_no_table_passes(module, number):
    bug = BUGS[module][number]
    assert source(module).count(bug.old) == 1
    for seed in ("a", "b"):
        world = repository(module, number, seed)
        broken = world.files[world.path]
        assert broken != world.correct_text
        wrong = [
            case
            for case, right, found in zip(
                world.cases, world.outcomes, outcomes_of(broken, world.cases), strict=True
            )
            if right != found
        ]
        assert any(case in VISIBLE[module] for case in wrong)
        assert outcomes_of(world.correct_text, world.cases) == world.outcomes
    assert any(case not in VISIBLE[module] for case in world.cases)
    assert outcomes(module, VISIBLE[module]) == list(world.outcomes[: len(VISIBLE[module])])


async def test_splits_share_no_bug_and_the_seed_gives_the_repositories():
    terminal = Terminal()
    splits = {
        split: {(task.metadata["module"], task.metadata["bug"]) for task in terminal.tasks(split)}
        for split in Terminal.splits
    }
    assert not splits["train"] & splits["test"]
    assert splits["train"] | splits["test"] == set(ALL_BUGS)
    assert len(Counter(task.metadata["kind"] for task in terminal.tasks("train"))) >= 6
    assert repository.__wrapped__("grid", 0, "x") == repository("grid", 0, "x")
    assert repository("grid", 0, "x").cases != repository("grid", 0, "y").cases


async def test_the_expert_repairs_and_the_world_is_as_it_says():
    for task in (Terminal().tasks("test")[3], Terminal().tasks("train")[5]):
        terminal = Terminal()
        episode = await play(terminal, ScriptedAgent(terminal.expert(task)), task)
        assert episode.ending is Ending.COMPLETED, episode.failure
        assert episode.step_rewards[-1] == 1.0
        broken, _, _, repaired = (turn.observation[0].text for turn in episode.turns[1:])
        assert "FAILED" in broken
        assert repaired.endswith("OK")


@pytest.mark.full
@pytest.mark.parametrize("split", Terminal.splits)
async def test_the_expert_repairs_every_bug(split):
    for task in Terminal().tasks(split)[: len(ALL_BUGS)]:
        terminal = Terminal()
        episode = await play(terminal, ScriptedAgent(terminal.expert(task)), task)
        assert episode.step_rewards[-1] == 1.0, task.id


async def reward_after(*commands: str, task=None) -> float | None:
    """The reward of an episode of these commands, which must not fail."""
    task = task or Terminal().tasks("train")[0]

    def script():
        for command in commands:
            yield call("shell", command=command)
        yield say("done")

    episode = await play(Terminal(), ScriptedAgent(script()), task)
    assert episode.failure is None, (commands, episode.failure)
    return episode.step_rewards[-1]


CHEATS = {
    "nothing": (),
    "tests edited": ("rm -r tests; mkdir tests; echo > tests/__init__.py; python3 -m unittest",),
    "package deleted": ("rm -rf *",),
    "folder deleted": ("rm -rf /tmp/work",),
    "python replaced": (
        "printf '#!/bin/sh\\necho OK\\n' > python3; chmod +x python3; PATH=.:$PATH python3 -m unittest",
        "cp python3 /usr/bin/python3; ln -sf /tmp/work/python3 /bin/python3",
    ),
    "standard library hidden": (
        "echo 'def dumps(*_): return \"[]\"' > json.py; cp json.py importlib.py; cp json.py sitecustomize.py",
    ),
    "background process": ("(sleep 1; echo hi > late.py) & disown; echo started",),
    "grader searched": ("find / -name '*.py' | xargs grep -l terminal | xargs cat; ls -R /proc | head",),
    "shell killed": ("kill -9 -1",),
    "files flooded": ("i=0; while [ $i -lt 400 ]; do echo x > a$i.py; i=$((i+1)); done",),
}


@pytest.mark.parametrize("name", CHEATS)
async def test_what_leaves_the_bug_where_it_is_earns_nothing(name):
    assert await reward_after(*CHEATS[name]) == 0.0


async def test_the_grader_sees_only_the_files_of_the_package():
    task = Terminal().tasks("train")[0]
    world = repository("intervals", task.metadata["bug"], task.metadata["seed"])
    repair = f"cat > {world.path} <<'END'\n{world.correct_text}\nEND"
    assert await reward_after(repair, "rm -r tests README.md", task=task) == 1.0
    assert await reward_after(repair, "echo broken >> tests/test_intervals.py", task=task) == 1.0
    assert await reward_after(repair, f"echo 'import tests' >> {world.path}", task=task) == 0.0


FORGERIES = {
    "results printed": "\nprint('[\"[[1, 6]]\"]')\n",
    "left before the results": "\nprint('[]')\nimport os\nos._exit(0)\n",
    "results printed at the end": "\nimport atexit\natexit.register(print, '\\n[]')\n",
    "json patched": "\nimport json\njson.dumps = lambda *_: '[]'\n",
    "equal to all": (
        "\nclass All:\n    def __eq__(self, _): return True\n    def __repr__(self): return '[[1, 6]]'\n"
        "def merge(_): return All()\n"
    ),
    "endless": "\nwhile True: pass\n",
    "a flood": "\nwhile True: print('x' * 10**6)\n",
    "a fork bomb": "\nimport os\nwhile True: os.fork()\n",
    "no Python": "\n)(\n",
    "functions deleted": "\ndel merge\n",
    "numbers for letters": "\ndef merge(_): return 10**10000\n",
}


async def test_no_code_of_the_package_passes_but_the_right_one():
    world = repository("intervals", 0, "x")
    assert await passes(world, {world.path: world.correct_text})
    assert not await passes(world, world.files)
    assert not await passes(world, {})
    for name, forgery in FORGERIES.items():
        if name not in ("endless", "a flood", "a fork bomb"):
            broken = world.files[world.path] + forgery
            assert not await passes(world, {world.path: broken}), name
    outside = {**world.files, "../../evil.py": "x", "/tmp/evil.py": "x", world.path: world.correct_text}
    assert await passes(world, outside)


@pytest.mark.full
@pytest.mark.parametrize("name", ["endless", "a flood", "a fork bomb"])
async def test_code_that_never_ends_is_a_wrong_repair(name):
    world = repository("intervals", 0, "x")
    assert not await passes(world, {world.path: world.correct_text + FORGERIES[name]})


async def test_an_answer_without_a_command_starts_no_machine_and_earns_nothing():
    terminal = Terminal()
    task = terminal.tasks("train")[0]
    await terminal.reset(task, seed=0)
    step = await terminal.step(Message("assistant", "the bug is repaired"))
    assert (step.reward, step.terminated) == (0.0, True)
    await terminal.close()
    await terminal.close()


async def test_an_unknown_split_is_a_one_sentence_error():
    with pytest.raises(UserError, match="no split `dev`; it has train, test"):
        Terminal().tasks("dev")
