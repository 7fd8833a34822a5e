"""Tasks in Harbor's format: the oracle scores 1, nothing 0, and no cheat more; all of it really runs."""

from __future__ import annotations

import base64
import json

import pytest
import pytest_asyncio

from agentrl import ScriptedAgent, call, play, say
from agentrl.envs.harbor import HarborTasks
from agentrl.envs.harbor.env import survey
from agentrl.errors import DataError, UserError
from agentrl.tools import release_shared
from tests.envs.harbor.folders import HELLO, PARTS, PLAIN_TEST, REPORT, write

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASKS = {"hello": HELLO, "report": REPORT, "parts": PARTS}


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _released():
    """One sandbox for all tests: the event loop of the module has it."""
    yield
    await release_shared()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("tasks")
    for name, files in TASKS.items():
        write(top / name, files)
    write(top / "imaged", {**HELLO, "environment/Dockerfile": "FROM nginx:1.27\nRUN npm install\n"})
    return str(top)


def environment(folder: str) -> HarborTasks:
    return HarborTasks(folder, test_share=1.0)


def task_of(env: HarborTasks, name: str):
    return next(task for task in env.tasks("test") if task.id == name)


async def played(folder: str, name: str, *commands: str):
    env = environment(folder)

    def script():
        for command in commands:
            yield call("shell", command=command)
        yield say("done")

    episode = await play(env, ScriptedAgent(script()), task_of(env, name))
    assert episode.failure is None, episode.failure
    return episode


@pytest.mark.parametrize("name", TASKS)
async def test_the_oracle_scores_1_and_nothing_0(folder, name):
    env = environment(folder)
    task = task_of(env, name)
    episode = await play(env, ScriptedAgent(env.expert(task)), task)
    assert episode.failure is None, episode.failure
    assert episode.step_rewards[-1] == 1.0, [turn.observation[0].text for turn in episode.turns]
    assert (await played(folder, name)).step_rewards[-1] == 0.0
    assert (await played(folder, name, "ls -la; pwd")).step_rewards[-1] == 0.0


async def test_the_environment_is_what_the_dockerfile_says(folder):
    episode = await played(
        folder,
        "report",
        "pwd; ls; cat note.txt; echo $CURRENCY/$NAME/$REGION; cat data/more.csv; git status --short",
        "cd /; ls; ls -A /tmp/work; tools/make.sh 2>&1; /app/tools/make.sh",
    )
    first, second = (turn.observation[0].text for turn in episode.turns[1:3])
    assert first.startswith(
        "/app\ndata\nnote.txt\nout\ntools\nEUR of two words\nEUR/two words/north\namount\n35\n"
    )
    assert "A  data/more.csv" in first
    assert "app\n" in second
    assert ".build" not in second
    assert second.endswith("made")


async def test_tests_and_solution_are_not_there_before_they_are_due(folder):
    needles = ["Hello, world!' in nothing", "test_outputs.py", "def test_hello", "solve.sh", "task.toml"]
    search = f"""python3 - <<'END'
import base64, json, os
needles = json.loads(base64.b64decode({base64.b64encode(json.dumps(needles).encode()).decode()!r}))
hits = []
for top, folders, files in os.walk("/"):
    if top.startswith(("/usr/lib", "/root", "/packages")):
        folders[:] = []
        continue
    hits += [os.path.join(top, name) for name in files if name in needles]
    for name in files:
        try:
            data = open(os.path.join(top, name), "rb").read(10**6)
        except OSError:
            continue
        hits += [os.path.join(top, name) for needle in needles if needle.encode() in data]
print("hits", hits, os.path.exists("/app"), os.listdir("/tests"), os.listdir("/solution"))
END"""
    episode = await played(folder, "hello", search)
    assert episode.turns[-1].observation[0].text == "hits [] True [] []"


ONE = "echo 1 > /logs/verifier/reward.txt"
EXITS = r"printf '#!/bin/sh\nexit 0\n'"
CHEATS = {
    "a reward": f"mkdir -p /logs/verifier; {ONE}; echo 1 > /logs/verifier/reward.json",
    "tests of its own": rf"mkdir -p /tests; printf '#!/bin/sh\n{ONE}\n' > /tests/test.sh",
    "a link for the tests": "rm -rf /tmp/work/tests; ln -s /app /tmp/work/tests; > test.sh; chmod 0 test.sh",
    "a link for the logs": (
        "rm -rf /tmp/work/logs; ln -s /app /tmp/work/logs; mkdir verifier; echo 1 > verifier/reward.txt"
    ),
    "modules": (
        r"printf 'import sys\nsys.exit(0)\n' > pytest.py; cp pytest.py sitecustomize.py; "
        "cp pytest.py pathlib.py"
    ),
    "a module of the user": (
        "d=$(python3 -c 'import site; print(site.getusersitepackages())'); "
        "mkdir -p $d /tmp/work/.verifier/home; "
        r"printf 'import os\nos._exit(0)\n' | tee $d/usercustomize.py $d/sitecustomize.py"
    ),
    "conftest": (
        r"printf 'def pytest_collection_modifyitems(items):\n    items.clear()\n' > conftest.py; "
        "cp conftest.py /tmp/work"
    ),
    "an ini": r"printf '[pytest]\naddopts = --co\n' > pytest.ini; cp pytest.ini /tmp/work",
    "programs": (
        "o=/tmp/work/.verifier/bin; mkdir -p $o; for p in uvx bash cat; do "
        f"{EXITS} > $o/$p; chmod +x $o/$p; done; cp $o/uvx ."
    ),
    "a process": f"(while :; do {ONE}; sleep 0.1; done) & disown",
    "no folder": "rm -rf /app /tmp/work",
    "a file for the folder": "cd /tmp; rm -rf /tmp/work; echo x > /tmp/work",
    "all locked": "chmod 000 /tmp/work",
    "a full disk": "head -c 400000000 /dev/urandom > big",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_no_cheat_earns_anything(folder, name):
    episode = await played(folder, "hello", CHEATS[name])
    assert episode.step_rewards[-1] == 0.0
    episode = await played(folder, "parts", CHEATS[name])
    assert episode.step_rewards[-1] == 0.0


async def test_the_right_files_count_whatever_else_was_done(folder):
    episode = await played(folder, "hello", "rm -rf /logs/* /tests", "printf 'Hello, world!' > hello.txt")
    assert episode.step_rewards[-1] == 1.0


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt", 0.5),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', 0.5),
        ("echo 1 > /logs/verifier/reward.txt; exit 3", 1.0),
        ("cd /logs/verifier; echo 1 > reward.txt; echo '{\"a\": 0.25}' > reward.json", 1.0),
        ("true", None),
        ("echo many > /logs/verifier/reward.txt", None),
        ("echo NaN > /logs/verifier/reward.txt", None),
        ("echo '{}' > /logs/verifier/reward.json", None),
        ("echo 1 > /logs/verifier/reward.txt; while :; do :; done", None),
    ],
)
async def test_what_the_tests_write_is_the_reward(tmp_path, script, reward):
    write(
        tmp_path / "one",
        {**HELLO, "tests/test.sh": f"#!/bin/bash\n{script}\n", "task.toml": "[verifier]\ntimeout_sec = 2\n"},
    )
    episode = await played(str(tmp_path), "one", "true")
    assert episode.step_rewards[-1] == (reward or 0.0)
    assert episode.counts.get("no_reward", 0) == int(reward is None)


IMAGES = {
    "FROM nginx:1.27": "FROM nginx",
    "FROM python:3.99-slim": "FROM python:3.99-slim (Python here is",
    "FROM ubuntu\nFROM debian": "FROM debian (a second stage)",
    "FROM ubuntu\nRUN apt-get install -y nginx git": "RUN apt-get install nginx",
    "FROM ubuntu\nRUN apt update && apt install -y build-essential": "RUN apt install build-essential",
    "FROM ubuntu\nRUN pip install no-such-one==1.0": "RUN installs no-such-one==1.0, which is neither",
    "FROM ubuntu\nRUN pip install -r requirements.txt": "RUN pip install -r",
    "FROM ubuntu\nRUN pip install git+ssh://x/y": "RUN installs git+ssh://x/y",
    "FROM ubuntu\nRUN python3 -m pip install numpy": "RUN python3 -m pip",
    "FROM ubuntu\nRUN cd /app && make all": "RUN make",
    "FROM ubuntu\nRUN curl https://localhost > x": "RUN curl",
    "FROM ubuntu\nRUN useradd -m sam": "RUN useradd",
    "FROM ubuntu\nRUN --mount=type=cache,target=/x true": "(with a mount)",
    "FROM ubuntu\nRUN <<EOF\ntrue\nEOF": "RUN <<EOF",
    "FROM ubuntu\nRUN mkdir -p /usr/local/bin": "RUN with /usr/local/bin (a task cannot write there)",
    "FROM ubuntu\nRUN echo x >> /etc/hosts": "RUN with /etc/hosts (a task cannot write there)",
    "FROM ubuntu\nUSER sam": "USER sam",
    "FROM ubuntu\nWORKDIR /etc/x": "WORKDIR /etc/x (a task cannot write there)",
    "FROM ubuntu\nWORKDIR /usr/local/app": "WORKDIR /usr/local/app",
    "FROM ubuntu\nCOPY nothing /app/": "COPY nothing /app/ (environment/ has no such file)",
    "FROM ubuntu\nCOPY Dockerfile /": "COPY Dockerfile / (a task cannot write there)",
    "FROM ubuntu\nCOPY --from=builder /x /y": "COPY --from=builder /x /y",
    "FROM ubuntu\nADD https://localhost/x /app/x": "ADD https://localhost/x /app/x",
    "FROM ubuntu\nADD a.tar.gz /app/": "ADD a.tar.gz /app/ (an archive)",
    "FROM ubuntu\nENV PATH=/app/bin:$PATH": "ENV PATH=/app/bin:$PATH",
    "FROM ubuntu\nENV LD_PRELOAD=/app/x.so": "ENV LD_PRELOAD=/app/x.so",
    'FROM ubuntu\nENTRYPOINT ["/x"]': "ENTRYPOINT",
    "FROM ubuntu\nVOLUME /data": "VOLUME /data",
    "FROM ubuntu\nARG X=1": "ARG X=1",
    "FROM ubuntu\nRUN echo 'unclosed": None,
    "FROM ubuntu\nENV X='unclosed": "ENV X='unclosed",
}


@pytest.mark.parametrize("dockerfile", IMAGES)
async def test_what_needs_an_image_is_refused_by_name(tmp_path, dockerfile):
    write(tmp_path / "one", {**HELLO, "environment/Dockerfile": dockerfile, "environment/a.tar.gz": b"x"})
    (task,) = survey(str(tmp_path))
    expected = IMAGES[dockerfile]
    if expected is None:
        assert not task.refused
        return
    assert any(why.startswith(expected) or expected in why for why in task.refused), task.refused
    with pytest.raises(DataError, match="no task that can be played without an image: one: "):
        environment(str(tmp_path)).tasks("test")


OTHERS = {
    "[environment]\ngpus = 1": ({}, "environment.gpus"),
    '[environment]\nenv = { KEY = "${KEY}" }': ({}, "env with ${...}, a variable of this machine"),
    '[[environment.mcp_servers]]\nname = "x"': ({}, "environment.mcp_servers"),
    '[agent]\nuser = "sam"': ({}, "agent.user = sam"),
    '[verifier]\nenvironment_mode = "separate"': ({}, "verifier.environment_mode"),
    '[[steps]]\nname = "x"': ({}, "steps"),
    "": ({"environment/docker-compose.yaml": "x"}, "environment/docker-compose.yaml"),
    "# a": ({"environment/.dockerignore": "x"}, "environment/.dockerignore"),
    "# b": ({"tests/test.sh": "cd /app && cargo test\n"}, "tests/test.sh: cargo"),
    "# c": ({"tests/test.sh": "pip install nosuchthing\n"}, "tests/test.sh: installs nosuchthing"),
    "# d": (
        {"tests/test.sh": "uvx -w pytest==8.4.1 -w nosuch==2 pytest x\n"},
        "tests/test.sh: installs nosuch==2",
    ),
    "# e": ({"solution/solve.sh": "apt-get install -y nginx\n"}, "solution/solve.sh: apt-get install nginx"),
    "# f": ({"tests/test.sh": "curl https://localhost\n"}, "tests/test.sh: curl"),
}


@pytest.mark.parametrize("settings", OTHERS)
async def test_settings_and_scripts_are_refused_by_name(tmp_path, settings):
    more, expected = OTHERS[settings]
    write(tmp_path / "one", {**HELLO, "task.toml": settings, **more})
    (task,) = survey(str(tmp_path))
    assert any(expected in why for why in task.refused), task.refused


async def test_an_image_that_was_built_of_the_dockerfile_changes_nothing(tmp_path):
    settings = '[environment]\ndocker_image = "someone/hello:1"\n'
    write(tmp_path / "one", {**HELLO, "task.toml": settings})
    files = {name: text for name, text in HELLO.items() if "Dockerfile" not in name}
    write(tmp_path / "two", {**files, "task.toml": settings})
    one, two = survey(str(tmp_path))
    assert one.refused == ()
    assert "environment.docker_image = someone/hello:1, without a Dockerfile" in two.refused


async def test_folders_that_a_command_names_are_the_episodes_own(tmp_path):
    dockerfile = (
        "FROM ubuntu\nRUN mkdir -p /data/in && echo 1 > /data/in/x; rm -rf /var/lib/apt/lists/* /tmp/*.deb\n"
    )
    write(tmp_path / "one", {**HELLO, "environment/Dockerfile": dockerfile})
    episode = await played(str(tmp_path), "one", "cat /data/in/x; echo 2 > /data/y; cat /data/y")
    assert episode.turns[-1].observation[0].text == "1\n2"


async def test_a_step_that_fails_is_a_failed_episode_and_no_zero(tmp_path):
    write(tmp_path / "one", {**HELLO, "environment/Dockerfile": "FROM ubuntu\nRUN cat no/such/file\n"})
    env = environment(str(tmp_path))
    episode = await play(
        env, ScriptedAgent(iter([call("shell", command="ls"), say("x")])), env.tasks("test")[0]
    )
    assert episode.failure is not None
    assert "No such file" in episode.failure.detail


async def test_splits_are_by_name_and_others_move_nothing(tmp_path):
    for number in range(30):
        write(tmp_path / f"task-{number}", HELLO)
    split = {task.id: name for name in ("train", "test") for task in HarborTasks(str(tmp_path)).tasks(name)}
    assert len(split) == 30
    assert 1 <= list(split.values()).count("test") <= 14
    write(tmp_path / "another", HELLO)
    from agentrl.envs.harbor import env as module

    module._paths.cache_clear()
    module.listed.cache_clear()
    later = {task.id: name for name in ("train", "test") for task in HarborTasks(str(tmp_path)).tasks(name)}
    assert {name: later[name] for name in split} == split
    with pytest.raises(UserError, match="no split `dev`"):
        HarborTasks(str(tmp_path)).tasks("dev")
    with pytest.raises(UserError, match="test_share is a share"):
        HarborTasks(str(tmp_path), test_share=2.0)


async def test_a_task_without_a_solution_has_no_expert(tmp_path):
    files = {name: text for name, text in HELLO.items() if not name.startswith("solution")}
    write(tmp_path / "one", {**files, "tests/test.sh": PLAIN_TEST})
    env = environment(str(tmp_path))
    with pytest.raises(UserError, match=r"has no solution/solve\.sh"):
        next(env.expert(env.tasks("test")[0]))
