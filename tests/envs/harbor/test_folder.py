"""A downloaded folder of tasks is nobody's friend: bounds, links, other users; and local wheels."""

from __future__ import annotations

import json
import os
import platform
import sys
import zipfile
from pathlib import Path

import pytest

from agentrl import ScriptedAgent, call, play, say
from agentrl.cli import main
from agentrl.envs.harbor import HarborTasks
from agentrl.envs.harbor import folder as folders
from agentrl.envs.harbor.dockerfile import commands, instructions
from agentrl.envs.harbor.env import survey
from agentrl.envs.harbor.packages import Found, Sources, requirement, unpacked
from agentrl.errors import DataError
from agentrl.runtime import ownership
from agentrl.tools import release_shared
from tests.envs.harbor.folders import HELLO, write


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def reason(folder: Path) -> str:
    """What is in the way of the one task of a folder."""
    (task,) = survey(str(folder))
    return "; ".join(task.refused)


def test_links_are_not_followed_wherever_they_are(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for number, name in enumerate(
        ("instruction.md", "task.toml", "tests/x", "solution", "environment/deep/y")
    ):
        top = tmp_path / f"tasks-{number}"
        place = write(top / "one", HELLO) / name
        if place.is_dir():
            place.rename(top / "elsewhere")
        elif place.exists():
            place.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(secret)
        with pytest.raises(DataError, match=r"is a link that leads out of"):
            survey(str(top))
    inside = write(tmp_path / "own" / "one", HELLO)
    (inside / "tests" / "linked").symlink_to("test.sh")
    assert "is a link" in reason(tmp_path / "own")
    (inside / "tests" / "linked").unlink()
    (inside / "environment" / "folder").symlink_to("../tests")
    assert "is a link" in reason(tmp_path / "own")


def test_tasks_of_another_user_are_refused(tmp_path, monkeypatch):
    write(tmp_path / "one", HELLO)
    ours = tmp_path.stat()
    # What this process would make here belongs to somebody else than what is there.
    other = os.stat_result((ours.st_mode, 0, 0, 1, ours.st_uid + 1, ours.st_gid, 0, 0, 0, 0))
    monkeypatch.setattr(ownership, "_made", lambda _: other)
    with pytest.raises(DataError, match=r"another user; copy the tasks, and name the copy"):
        survey(str(tmp_path))


def test_what_all_users_can_write_is_refused(tmp_path):
    task = write(tmp_path / "one", HELLO)
    (task / "task.toml").chmod(0o666)
    with pytest.raises(DataError, match="all users can write to"):
        survey(str(tmp_path))


def test_pipes_and_large_or_many_files_are_refused(tmp_path, monkeypatch):
    task = write(tmp_path / "one", HELLO)
    os.mkfifo(task / "tests" / "pipe")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        survey(str(tmp_path))
    (task / "tests" / "pipe").unlink()
    (task / "environment" / "big").write_bytes(b"x" * 5000)
    monkeypatch.setattr(folders, "MOST_BYTES", 4000)
    assert "has more than 4,000 bytes" in reason(tmp_path)
    folders.read_task.cache_clear()
    monkeypatch.setattr(folders, "MOST_BYTES", 10**6)
    monkeypatch.setattr(folders, "MOST_FILES", 3)
    assert "has more than 3 files" in reason(tmp_path)
    folders.read_task.cache_clear()
    monkeypatch.setattr(folders, "MOST_FILES", 500)
    write(task, {f"tests/{'/'.join('abcdefghijklmno')}/x": "x"})
    assert "is deeper than 12 folders" in reason(tmp_path)
    monkeypatch.setattr(folders, "MOST_TASKS", 0)
    with pytest.raises(DataError, match="holds 1 tasks; at most 0"):
        survey(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("task.toml", "x = [", "cannot be read"),
        ("task.toml", "[environment]\nmemory_mb = 'much'\n", "environment.memory_mb"),
        ("task.toml", "x" * 300_000, "has more than 262,144 bytes"),
        ("task.toml", b"\xff\xfe", "cannot be read"),
        ("instruction.md", None, "cannot be read: No such file"),
        ("tests/a\nb", "x", "a name that cannot be printed"),
    ],
)
def test_a_broken_task_is_one_sentence(tmp_path, name, text, said):
    task = write(tmp_path / "one", HELLO)
    if text is None:
        (task / name).unlink()
    else:
        write(task, {name: text})
    assert said in reason(tmp_path)


def test_a_folder_without_tasks_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="holds no task"):
        survey(str(tmp_path))
    with pytest.raises(DataError, match="is no folder"):
        survey(str(tmp_path / "none"))
    assert [task.name for task in survey(str(write(tmp_path / "one", HELLO)))] == ["one"]


def test_a_dockerfile_is_read_as_docker_reads_it():
    text = "# syntax\nfrom a AS b\nRUN one && \\\n  # a comment within\n  two\nENV A=1 B='x y'\n"
    text += 'ENV C d e\nRUN ["x", "y z"]\n'
    read = instructions(text)
    assert [each.name for each in read] == ["FROM", "RUN", "ENV", "ENV", "RUN"]
    assert read[1].command().split() == ["one", "&&", "two"]
    assert read[2].assignments() == {"A": "1", "B": "x y"}
    assert read[3].assignments() == {"C": "d e"}
    assert read[4].command() == "x 'y z'"
    found = [
        words[0]
        for words in commands("A=1 one x; two | three && { four; }\nif five; then six; fi\n# seven\n")
    ]
    assert found == ["one", "two", "three", "four", "five", "six", "fi"]


def wheel(
    folder: Path, name: str, version: str, files: dict[str, str], needs: str = "", tags: str = "py3-none-any"
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for inside, text in files.items():
            packed.writestr(inside, text)
        packed.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n{needs}\n\nText\n"
        )
    return path


async def test_packages_come_from_a_mirror_in_the_versions_that_are_named(tmp_path):
    mirror = tmp_path / "mirror"
    wheel(mirror, "greeter", "1.0", {"greeter.py": "def greeting(): return 'old'\n"})
    needs = "Requires-Dist: words_of (>=1)\nRequires-Dist: nothing_of; extra == 'x'\n"
    wheel(mirror, "greeter", "2.0", {"greeter.py": "from words_of import HELLO as greeting\n"}, needs)
    wheel(mirror, "words_of", "1.1", {"words_of/__init__.py": "HELLO = 'Hello, world!'\n"})
    solution = "python3 -c 'import greeter; print(greeter.greeting)' > hello.txt\n"
    for name, version in (("new", "2.0"), ("other", "3.0")):
        dockerfile = f"FROM python:3.10\nRUN pip install --no-cache-dir greeter=={version} pydantic\n"
        write(
            tmp_path / "tasks" / name,
            {**HELLO, "environment/Dockerfile": dockerfile, "solution/solve.sh": solution},
        )
    states = {task.name: task.refused for task in survey(str(tmp_path / "tasks"), str(mirror))}
    assert states["new"] == ()
    assert states["other"] == ("RUN installs greeter==3.0, which is neither here nor in the mirror",)
    env = HarborTasks(str(tmp_path / "tasks"), mirror=str(mirror), test_share=1.0)
    (task,) = env.tasks("test")
    episode = await play(env, ScriptedAgent(env.expert(task)), task)
    assert episode.failure is None, episode.failure
    assert episode.step_rewards[-1] == 1.0
    shown = (
        "python3 -c 'import pydantic, greeter; print(pydantic.__name__, greeter.__file__)'; touch /wheels/x"
    )
    env = HarborTasks(str(tmp_path / "tasks"), mirror=str(mirror), test_share=1.0)
    episode = await play(env, ScriptedAgent(iter([call("shell", command=shown), say("x")])), task)
    text = episode.turns[-1].observation[0].text
    assert "pydantic /wheels/greeter-2.0-py3-none-any/greeter.py" in text
    assert "Read-only file system" in text
    await release_shared()


def found_in(mirror: Path, text: str) -> list[str] | str:
    """The wheels of a requirement, or what is missing."""
    found = Sources(str(mirror)).find(requirement(text))
    return sorted(path.name for path in found.wheels) if isinstance(found, Found) else str(found)


def test_the_newest_wheel_that_fits_and_runs_here_is_chosen(tmp_path):
    major, minor = sys.version_info[:2]
    place = f"manylinux_2_17_{platform.machine()}"
    for version in ("9.0", "10.0", "11.0rc1"):
        wheel(tmp_path, "one", version, {})
    assert found_in(tmp_path, "one") == ["one-10.0-py3-none-any.whl"], "versions are no texts"
    assert found_in(tmp_path, "One[more]>=9,<10") == ["one-9.0-py3-none-any.whl"]
    assert found_in(tmp_path, "one==9.*") == ["one-9.0-py3-none-any.whl"]
    assert found_in(tmp_path, "one>11") == "one>11"
    wheel(tmp_path, "two", "1.0", {}, tags=f"cp{major}{minor - 1}-abi3-{place}")
    wheel(tmp_path, "two", "2.0", {}, tags=f"cp{major}{minor + 1}-abi3-{place}")
    wheel(tmp_path, "two", "3.0", {}, tags=f"cp{major}{minor}-cp{major}{minor}-win_amd64")
    assert found_in(tmp_path, "two") == [f"two-1.0-cp{major}{minor - 1}-abi3-{place}.whl"]


def test_what_a_wheel_needs_is_found_in_a_version_that_fits(tmp_path):
    for version in ("1.0", "1.9", "2.0"):
        wheel(tmp_path, "need", version, {})
    lines = "Requires-Dist: need (>=1,<2)\nRequires-Dist: pydantic>=2\n"
    lines += "Requires-Dist: nothing_of; extra == 'x'\nRequires-Dist: nothing_of; python_version < '3'\n"
    wheel(tmp_path, "one", "1.0", {}, lines)
    assert found_in(tmp_path, "one") == ["need-1.9-py3-none-any.whl", "one-1.0-py3-none-any.whl"]
    assert Sources(str(tmp_path)).find(requirement("one")).installed == {"pydantic"}
    assert found_in(tmp_path, "one[x]") == 'nothing_of; extra == "x"'
    wheel(tmp_path, "two", "1.0", {}, "Requires-Dist: need>2\n")
    assert found_in(tmp_path, "two") == "need>2"
    wheel(tmp_path, "three", "1.0", {}, "Requires-Dist: pydantic<1\n")
    assert found_in(tmp_path, "three") == "pydantic<1"
    # A version is chosen once.
    wheel(tmp_path, "four", "1.0", {}, "Requires-Dist: one\nRequires-Dist: need==2\n")
    assert found_in(tmp_path, "four") in ("need==2", "need<2,>=1")


@pytest.mark.parametrize("name", ["../out.py", "/tmp/out.py", "a/../../out.py", "a\\..\\out.py"])
def test_a_wheel_writes_nowhere_else(tmp_path, name):
    path = wheel(tmp_path / "mirror", "bad", "1.0", {name: "x"})
    with pytest.raises(DataError, match="names a file outside of itself"):
        unpacked(path)
    assert not list(tmp_path.rglob("out.py"))


def test_a_wheel_that_unpacks_to_too_much_or_is_none_is_one_sentence(tmp_path, monkeypatch):
    path = wheel(tmp_path / "mirror", "big", "1.0", {"big.py": "x" * 5000})
    monkeypatch.setattr("agentrl.envs.harbor.packages._MOST_WHEEL_BYTES", 4000)
    with pytest.raises(DataError, match="which is too much"):
        unpacked(path)
    path.write_bytes(b"no zip")
    with pytest.raises(DataError, match="is no wheel that can be unpacked"):
        unpacked(path)
    with pytest.raises(DataError, match="is no wheel that can be read"):
        Sources(str(tmp_path / "mirror")).find(requirement("big"))
    with pytest.raises(DataError, match="is no folder"):
        Sources(str(tmp_path / "none")).find(requirement("big"))


def test_the_command_lists_a_folder_and_what_each_task_needs(tmp_path, capsys):
    write(tmp_path / "good", HELLO)
    write(tmp_path / "imaged", {**HELLO, "environment/Dockerfile": "FROM nginx\nUSER sam\n"})
    main(["envs", "list", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "good" in shown
    assert "FROM nginx" in shown
    assert "1 of 2 tasks" in shown
    main(["envs", "list", str(tmp_path), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed == [
        {"name": "good", "refused": []},
        {"name": "imaged", "refused": ["FROM nginx", "USER sam"]},
    ]
    with pytest.raises(SystemExit) as leaving:
        main(["envs", "list", str(tmp_path / "good" / "tests")])
    assert leaving.value.code == 2
    assert "holds no task" in capsys.readouterr().err
