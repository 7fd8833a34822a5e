"""Repositories: faults, hidden tests, histories, and attacks on all of them. Every program really runs."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil

import pytest
import pytest_asyncio

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.tools import release_shared
from envs_contrib.repositories import Repositories, RepositoriesHarness, grading, history
from envs_contrib.repositories.patterns import filled
from envs_contrib.repositories.programs import LANGUAGES, names, program
from envs_contrib.repositories.repository import repository
from envs_contrib.repositories.suite import repair, repository_of, shell_tool

ALL = [(name, number) for name in names() for number in range(len(program(name).faults))]
QUICK = {
    f"{language}/{stem}" for language, stem in zip(LANGUAGES, ("roads", "paths", "bins", "todo"), strict=True)
}
EACH = [
    pytest.param(name, number, marks=() if name in QUICK and number == 0 else pytest.mark.full)
    for name, number in ALL
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _released():
    """One sandbox for all tests: the event loop of the module has it."""
    yield
    await release_shared()


def task_of(name: str, number: int):
    for split in ("train", "test"):
        for task in Repositories().tasks(split):
            if (task.metadata["program"], task.metadata["fault"]) == (name, number):
                return task
    raise AssertionError((name, number))


async def played(task, *commands: str):
    """The episode of these commands, which must not fail."""

    def script():
        for command in commands:
            yield call("shell", command=command)
        yield say("done")

    episode = await play(Repositories(), ScriptedAgent(script()), task)
    assert episode.failure is None, (commands, episode.failure)
    return episode


async def test_the_suite_is_as_large_as_it_says():
    assert len(ALL) >= 50
    assert {name.partition("/")[0] for name in names()} == set(LANGUAGES)
    assert len({fault.kind for name in names() for fault in program(name).faults}) >= 15
    train, test = Repositories().tasks("train"), Repositories().tasks("test")
    faults = [
        {(task.metadata["program"], task.metadata["fault"]) for task in tasks} for tasks in (train, test)
    ]
    assert not faults[0] & faults[1]
    assert faults[0] | faults[1] == set(ALL)
    assert {task.metadata["language"] for task in train[:4]} == set(LANGUAGES)


@pytest.mark.parametrize(("name", "number"), EACH)
async def test_the_solution_scores_1_and_nothing_0(name, number):
    task = task_of(name, number)
    env = Repositories()
    episode = await play(env, ScriptedAgent(env.expert(task)), task)
    assert episode.failure is None, episode.failure
    assert episode.step_rewards[-1] == 1.0
    before, after = episode.turns[1].observation[0].text, episode.turns[-1].observation[0].text
    assert "FAILED" in before
    assert "FAILED" not in after
    assert "ok" in after
    assert (await played(task)).step_rewards[-1] == 0.0
    assert (await played(task, "touch new; sh run_tests.sh")).step_rewards[-1] == 0.0


@pytest.mark.parametrize(("name", "number"), EACH)
async def test_a_fault_fails_hidden_calls_that_no_table_of_visible_ones_passes(name, number):
    """The visible outcomes are the suite's own words; the hidden ones are those of the correct program."""
    for seed in ("a", "b"):
        world = repository(name, number, seed)
        right = await grading.correct_outcomes(world)
        wrong = await grading._outcomes(world, world.files)
        differing = [place for place, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
        assert any(place < world.num_visible for place in differing)
        assert any(place >= world.num_visible for place in differing)
        assert all(code is not None and text is not None for code, text in right)
        assert world.fault.old not in world.fault.new or world.fault.new.count(world.fault.old) == 0


SEARCH = """
import base64, json, os, subprocess
needles = json.loads(base64.b64decode(b"%s"))
def found(data):
    return [needle for needle in needles if needle.encode() in data]
hits = []
for top, folders, files in os.walk("/"):
    if top.startswith(("/usr/lib", "/lib")):
        folders[:] = []
        continue
    for name in files:
        path = os.path.join(top, name)
        try:
            with open(path, "rb") as file:
                hits += [[path, needle] for needle in found(file.read(4_000_000))]
        except OSError:
            pass
objects = subprocess.run(["git", "cat-file", "--batch", "--batch-all-objects"], capture_output=True)
assert objects.returncode == 0 and len(objects.stdout) > 1000
hits += [["history", needle] for needle in found(objects.stdout)]
print("hits:", json.dumps(hits))
"""


@pytest.mark.parametrize(("name", "number"), EACH)
async def test_neither_the_hidden_tests_nor_the_solution_can_be_read(name, number):
    task = task_of(name, number)
    world = repository_of(task)
    right = world.correct_text.splitlines()
    lines = [
        line for line in right if line not in world.files[world.path].splitlines() and len(line.strip()) > 9
    ]
    hidden = [c.stdin for c in world.calls[world.num_visible :] if len(c.stdin) > 16]
    visible = [c.stdin for c in world.calls[: world.num_visible]]
    secrets = [*lines, world.correct_text, *(set(hidden) - set(visible)), "envs_contrib"]
    assert len(secrets) > 4
    # The search is a real one: it finds a text that is there.
    there = world.files["README.md"]
    needles = base64.b64encode(json.dumps([*secrets, there]).encode()).decode()
    search = SEARCH % needles
    shell = shell_tool(tuple(LANGUAGES)).shell({**world.files, ".search": search}, world.prepare)
    async with shell:
        said = await shell.run("python3 .search")
    hits = json.loads(said.rpartition("hits: ")[2])
    assert [hit for hit in hits if hit[1] in secrets] == []
    assert {hit[0] for hit in hits if hit[1] == there} == {"/tmp/work/README.md", "history"}


async def test_the_agents_machine_has_no_way_to_the_host_or_to_another_session():
    task = task_of("python/roads", 0)
    episode = await played(
        task,
        "ls -A / /tmp /packages /proc /root /work 2>&1",
        "find / -name '*.toml' -o -name 'grading*' 2>/dev/null | grep -v ^/usr/lib | head",
        "git log --all -p --format=%B | head -400; git stash list; git fsck --lost-found 2>&1",
    )
    world = repository_of(task)
    text = "\n".join(turn.observation[0].text for turn in episode.turns[1:])
    assert "envs_contrib" not in text
    assert "roads.toml" not in text
    assert program("python/roads").faults[0].old.splitlines()[0] not in text.replace(world.fault.new, "")


CHEATS = {
    "program deleted": ("rm -f network.py roads.py",),
    "exit 0": ("echo 'import sys; sys.exit(0)' > roads.py",),
    "tests edited": (
        "for f in tests/*/; do python3 roads.py < ${f}stdin > ${f}stdout; done; sh run_tests.sh",
    ),
    "tests deleted": ("rm -r tests; printf '#!/bin/sh\\necho ok\\n' > run_tests.sh",),
    "python replaced": ("printf '#!/bin/sh\\ncat tests/1/stdout\\n' > python3; chmod +x python3",),
    "history rewritten": ("git checkout -q --orphan x; git commit -qam 'repaired'; rm -rf .git",),
    "a server left": ("(sleep 60; echo late > late.py) & disown",),
    "a link to all": ("ln -s / everything; ln -sf /dev/urandom roads.py",),
    "files flooded": ("i=0; while [ $i -lt 400 ]; do echo x > a$i.py; i=$((i+1)); done",),
    "shell killed": ("kill -9 -1",),
}


@pytest.mark.parametrize("name", CHEATS)
async def test_what_leaves_the_fault_where_it_is_earns_nothing(name):
    assert (await played(task_of("python/roads", 0), *CHEATS[name])).step_rewards[-1] == 0.0


async def test_a_table_of_the_visible_tests_earns_nothing():
    task = task_of("python/roads", 0)
    world = repository_of(task)
    known = {c.stdin: c.stdout for c in world.calls[: world.num_visible]}
    table = f"import sys\ntext = sys.stdin.read()\nprint({known!r}.get(text, ''), end='')\n"
    cheat = {**world.files, "roads.py": table}
    assert not await grading.passes(world, cheat)
    found = await grading._outcomes(world, cheat)
    right = await grading.correct_outcomes(world)
    assert found[: world.num_visible] == right[: world.num_visible]


ENDLESS = {
    "endless": "\nwhile True: pass\n",
    "a flood": "\nwhile True: print('x' * 10**6)\n",
    "a fork bomb": "\nimport os\nwhile True: os.fork()\n",
    "the grader killed": "\nimport os\nos.kill(-1, 9)\n",
    "results printed": "\nprint('[[0, \"9\"]]')\n",
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_correct_program_with_more_behind_it_is_wrong(name):
    world = repository("python/roads", 0, "x")
    broken = {**world.correct, "roads.py": world.correct["roads.py"] + ENDLESS[name]}
    assert await grading.passes(world, world.correct)
    assert not await grading.passes(world, broken)


async def test_any_repair_counts_and_only_the_program_is_run():
    task = task_of("awk/bins", 0)
    world = repository_of(task)
    done = await played(
        task, repair(world), "rm -r tests README.md run_tests.sh", "mkdir new; echo x > new/y"
    )
    assert done.step_rewards[-1] == 1.0


async def test_the_history_is_that_of_the_files_and_holds_no_repair():
    world = repository("shell/paths", 1, "x")
    async with shell_tool(tuple(LANGUAGES)).shell(world.files, world.prepare) as shell:
        said = await shell.run(
            "git status --porcelain; git log --format=%an:%s; git diff HEAD~2 --stat | tail -1"
        )
        assert "Write " in said
        assert "Test it" in said
        assert "??" not in said
        assert await shell.files() == dict(world.files)
        assert "1 file changed" in await shell.run(
            "echo x >> README.md; git commit -qam more; git show --stat | tail -1"
        )
        versions = await shell.run("for c in $(git rev-list --all); do git show $c:paths.sh 2>&1; done")
        assert world.correct_text not in versions
        assert world.files["paths.sh"] in versions


async def test_without_git_the_history_is_a_file(monkeypatch):
    monkeypatch.setattr(history, "has_git", lambda: False)
    world = repository.__wrapped__("shell/paths", 1, "x")
    assert world.prepare == ""
    assert "Add tests of what users have reported" in world.files[history.LOG]
    assert await grading.passes(world, {**world.files, **world.correct})


async def test_what_a_machine_lacks_is_one_sentence(monkeypatch):
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "perl" else real(name, **more))
    with pytest.raises(
        UserError, match=r"in perl need `perl`, which /usr/bin and /bin do not have; install it"
    ):
        Repositories().tasks("train")
    assert Repositories(languages=["awk", "shell"]).tasks("test")
    with pytest.raises(UserError, match="no language `cobol`; it has python, shell, awk, perl"):
        Repositories(languages=["cobol"]).tasks("train")
    with pytest.raises(UserError, match="no split `dev`"):
        Repositories().tasks("dev")


async def test_an_interpreter_that_computes_something_else_is_one_sentence():
    world = repository("awk/bins", 0, "y")
    other = world._replace(correct={**world.correct, "bins.awk": "BEGIN { print 1 }\n"})
    with pytest.raises(UserError, match=r"`awk` of this machine does not run bins\.awk as the suite expects"):
        await grading.passes(other, world.files)


AGENT = r"""
import json, os, subprocess, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": open(".agent/task.md").read()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(subprocess.run(["sh", "-c", reply], capture_output=True, text=True).stdout)
"""


class OneCommand(RepositoriesHarness):
    """Runs the one command that the model answers."""

    program = "python3 .agent/agent.py"

    def files(self, task):
        return {**super().files(task), ".agent/agent.py": AGENT}


@pytest.mark.parametrize("is_right", [True, False])
async def test_a_program_of_ones_own_is_an_agent_of_the_suite(is_right):
    env = OneCommand()
    task = task_of("perl/todo", 0)
    world = repository_of(task)
    command = f"{repair(world)}\ngit status --porcelain; git log --oneline" if is_right else "echo x > y"
    episode = await play(env, ScriptedAgent(iter([say(command)])), task)
    assert episode.failure is None, episode.failure
    assert episode.step_rewards[-1] == float(is_right)


async def test_patterns_have_every_choice_and_no_other_text():
    rng = random.Random(0)
    texts = {filled("«a|«b|c»|»-«1..3»", rng) for _ in range(400)}
    assert texts == {f"{a}-{n}" for a in ("a", "b", "c", "") for n in (1, 2, 3)}
    counts = {filled("«2..4*x«-1..0»¦»", rng).count("|") for _ in range(100)}
    assert counts == {2, 3, 4}
    with pytest.raises(ValueError, match="not closed"):
        filled("«a", rng)


@pytest.mark.parametrize("name", names())
async def test_a_program_is_what_its_file_says(name):
    whole = program(name)
    for fault in whole.faults:
        assert sum(text.count(fault.old) for text in whole.texts.values()) == 1, fault
    for word, others in whole.words.items():
        assert others[0] == word
        assert all(
            re.search(rf"\b{word}\b", text) is None for c in whole.visible for text in (c.stdin, c.stdout)
        )
