"""The shell tool: commands, files that stay, limits; and attacks on them. Every command really runs."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.errors import ToolError, ToolRejected, UserError
from agentrl.tools import ShellTool, make_tool, release_shared
from agentrl.tools.shell.tool import MOST_COMMAND_BYTES, MOST_FILE_BYTES, MOST_FILES, PROGRAMS
from tests.tools.python.sandboxed import gone

LIMITS = {"sandbox": "namespaces", "memory_mb": 100, "files_mb": 8, "processes": 12, "output_chars": 4000}
PATIENT = ShellTool(**LIMITS, timeout_s=8.0)
HASTY = ShellTool(**LIMITS, timeout_s=0.5)
"""Two tools for all tests: each starts one sandbox for the event loop of this module."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def shell(files=None, tool=PATIENT):
    """A shell with these files."""
    async with tool.shell(files) as opened:
        yield opened


async def test_commands_share_files_and_nothing_else():
    async with shell({"notes/a.txt": "one\n"}) as machine:
        assert await machine.run("x=5; cd notes; sed -i s/one/two/ a.txt; ls; export y=6") == "a.txt"
        assert await machine.run("cat notes/a.txt; pwd; echo $x$y") == "two\n/tmp/work"
        assert await machine.run("echo out; echo err >&2; exit 3") == "out\nerr\n\n[exit code 3]"
        assert await machine.run("true") == "(no output)"
        assert await machine.run("printf 'a\\nb' > c; sort -r c | head -n 1") == "b"
        assert await machine.run("python3 -c 'import json; print(json.dumps([6 * 7]))'") == "[42]"
        assert await machine.files() == {"c": "a\nb", "notes/a.txt": "two\n"}


async def test_an_episode_of_the_tool_begins_with_an_empty_folder():
    async with PATIENT.episode() as (first,), PATIENT.episode() as (second,):
        assert await first.invoke({"command": "echo mine > a; ls"}) == "a"
        assert await second.invoke({"command": "ls"}) == "(no output)"
        with pytest.raises(ToolRejected):
            await first.invoke({"command": 5})
    assert PATIENT.schemas == (PATIENT.schema,)


LOOK = """
python=$(dirname "$(dirname "$(realpath /bin/python3)")")
find / -type f -not -path '/usr/lib*' -not -path "$python/*" 2>/dev/null
echo --; ls /usr/bin
echo --; env | cut -d= -f1 | sort
echo --; ls -A /proc /home /etc /root/.ssh 2>/dev/null
"""


async def test_only_the_programs_of_the_list_and_no_file_of_this_machine_are_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    async with shell() as machine:
        files, programs, names, rest = (
            part.split() for part in (await machine.run(LOOK)).partition("\n\n[")[0].split("--")
        )
    allowed = ("/usr/bin/", "/dev/", "/tmp/work/")
    assert [path for path in files if not path.startswith(allowed)] == []
    assert set(programs) <= {*PROGRAMS, "python", "python3"}
    assert {"cat", "grep", "sed", "sh", "python3"} <= set(programs)
    assert not {"mount", "su", "sudo", "git", "perl", "curl", "gcc", "ssh"} & set(programs)
    assert "SECRET_TOKEN" not in names
    assert {name for name in rest if not name.endswith(":")} == set()


async def test_there_is_no_network_and_no_way_to_write_elsewhere():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        async with shell() as machine:
            address = f"/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
            assert "exit code" in await machine.run(f"echo hello > {address}")
            for path in ("/usr/bin/sh", "/usr/bin/x", "/bin/python3", "/usr/lib/x", "/x", "/proc/x"):
                assert "exit code" in await machine.run(f"echo x > {path}"), path
            assert "exit code" in await machine.run("rm -f /usr/bin/cat")
            assert await machine.run("echo fine | cat") == "fine"
        with pytest.raises(TimeoutError):
            server.accept()


async def test_a_command_that_takes_too_long_is_stopped_and_the_files_stay():
    async with shell(tool=HASTY) as machine:
        assert (await machine.run("echo begun > log; sleep 60")).endswith("[stopped after 0.5 s]")
        assert await machine.files() == {"log": "begun\n"}


DETACHED = """
python3 -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open("log", "a").write("x")
            time.sleep(0.01)
'
sleep 0.1
"""


async def test_nothing_runs_on_after_its_command():
    async with shell() as machine:
        await machine.run(DETACHED)
        size = len(await machine.run("cat log"))
        assert size > 1
        assert await machine.run("sleep 0.2; wc -c < log") == str(size)
        assert await machine.run("(while true; do echo y >> log; done) & disown; echo on") == "on"
        size = await machine.run("wc -c < log")
        assert await machine.run("sleep 0.1; wc -c < log") == size


async def test_a_fork_bomb_ends_and_harms_no_sibling():
    async with shell(tool=HASTY) as bombed, shell({"a": "1"}) as sibling:
        bombing = asyncio.create_task(bombed.run("bomb() { bomb | bomb & }; bomb; sleep 9"))
        await asyncio.sleep(0.2)
        assert await sibling.run("cat a") == "1"
        await asyncio.wait([bombing])
        assert bombing.exception() is None or isinstance(bombing.exception(), ToolRejected)
        assert await bombed.run("echo next") == "next"


@pytest.mark.parametrize(
    "command", ["kill -9 -1", "kill -9 $PPID", "python3 -c 'x = bytes(10**9)' ; kill -9 $PPID"]
)
async def test_a_shell_that_is_killed_starts_again_with_its_first_files(command):
    async with shell({"a": "first"}) as machine:
        await machine.run("echo changed > a")
        with pytest.raises(ToolRejected, match="starts again with its first files") as ended:
            await machine.run(command)
        assert ended.value.kind == "signal"
        assert await machine.files() == {"a": "first"}
        assert await machine.run("cat a") == "first"


async def test_memory_of_all_processes_together_is_bounded():
    hog = "python3 -c 'x = bytearray(50 * 2**20); import time; time.sleep(60)' &"
    async with shell() as machine:
        with pytest.raises(ToolRejected, match="more than 100 MB") as ended:
            await machine.run(f"{hog} {hog} {hog} wait")
        assert ended.value.kind == "memory"


async def test_a_flood_of_output_loses_its_middle():
    async with shell() as machine:
        text = await machine.run("seq 1 100000; echo end")
        assert text.startswith("1\n2\n")
        assert text.endswith("end")
        assert "characters are left out" in text
        flood = await machine.run("head -c 3000000 /dev/urandom | tr -c x x")
        assert "bytes are left out" in flood
        assert max(len(text), len(flood)) < 4100


STRANGE = """
mkdir -p .hidden __pycache__ deep; echo x > .hidden/a; echo x > __pycache__/b
ln -s /usr/bin/cat link; ln -s . loop
python3 - <<'END'
import os
os.write(os.open(b"\\xff\\n.txt", os.O_CREAT | os.O_WRONLY), b"x")
open("binary", "wb").write(b"\\xff\\x00")
os.makedirs("deep/d/d")
open("deep/d/d/leaf", "w").write("leaf")
path = "deep/d/d"
for _ in range(1200):
    path += "/d"
    os.mkdir(path)
END
"""


async def test_the_files_are_regular_ones_and_bounded_whatever_a_command_leaves():
    async with shell({"a": "1"}) as machine:
        await machine.run(STRANGE)
        files = await machine.files()
        assert files.pop("deep/d/d/leaf") == "leaf"
        assert files == {"a": "1", "binary": "\ufffd\0"}
        await machine.run("rm -rf deep; seq 1 500 | xargs -I{} touch b{}")
        assert len(await machine.files()) == MOST_FILES
        await machine.run(f"rm -f b*; head -c {MOST_FILE_BYTES} /dev/urandom > z; echo 1 > zz")
        files = await machine.files()
        assert sum(len(text.encode()) for text in files.values()) <= MOST_FILE_BYTES
        await machine.run("rm -rf /tmp/work")
        assert await machine.files() == {}
        assert await machine.run("echo back > a; ls") == "a"


async def test_commands_that_no_shell_can_take_are_refused_without_starting_one():
    async with shell() as machine:
        for command, kind in (("x" * (MOST_COMMAND_BYTES + 1), "length"), ("a\0b", "null")):
            with pytest.raises(ToolRejected) as refused:
                await machine.run(command)
            assert refused.value.kind == kind
        assert await machine.run("echo '\ud800'") == "?"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sandbox": "none"}, "no sandbox `none`"),
        ({"programs": ["cat"]}, "needs `bash` or `sh` among its programs"),
        ({"output_chars": 0}, "output_chars above 0"),
        ({"timeout_s": -1.0}, "timeout_s above 0"),
    ],
)
async def test_settings_that_cannot_hold_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        ShellTool(**settings)


@pytest.mark.parametrize("name", ["no-such-program", "../bin/sh", "/usr/bin/cat"])
async def test_a_program_that_is_not_installed_is_named(name):
    tool = ShellTool(programs=["sh", name], sandbox="namespaces")
    with pytest.raises(UserError, match=f"the program `{name}`, which /usr/bin does not have"):
        async with tool.episode() as (machine,):
            await machine.invoke({"command": "true"})


async def test_no_process_remains_when_the_tools_are_released():
    await release_shared()
    assert await gone(set())


async def test_a_run_can_name_it_and_give_it_arguments():
    tool = make_tool("shell", name="bash", timeout_s=2)
    assert isinstance(tool, ShellTool)
    assert tool.schema.name == "bash"


async def test_no_program_of_the_list_has_rights_of_its_own():
    for name in PROGRAMS:
        path = Path("/usr/bin") / name
        assert not path.exists() or not os.stat(path).st_mode & 0o6000, name


async def test_a_module_that_is_written_again_at_once_is_the_new_one():
    async with ShellTool().shell({"m.py": "x = 1\n"}) as shell:
        show = "python3 -c 'import m; print(m.x)'"
        said = await shell.run(f"{show}; echo 'x = 2' > m.py; {show}; ls")
    assert said == "1\n2\nm.py"


async def test_a_folder_is_prepared_by_a_command_before_the_first_one():
    async with ShellTool().shell({"a": "one\n", "b": b"\xff\x00"}, "cat a a > c; mkdir d") as shell:
        assert await shell.files() == {"a": "one\n", "b": "\ufffd\x00"}
        assert await shell.run("ls; cat c; wc -c < b") == "a\nb\nc\nd\none\none\n2"
        await shell.put({"e/f": b"new\n"})
        assert (await shell.executed("cat e/f; exit 3", {})).output == "new\n"
        late = await shell.executed("sleep 9", {}, 0.2)
        assert late.timed_out
    async with ShellTool().shell({}, "echo no such thing >&2; exit 4") as shell:
        with pytest.raises(ToolError, match="exit code 4: no such thing"):
            await shell.run("ls")


async def test_places_lead_into_the_folder_and_mounts_cannot_be_written(tmp_path):
    # Where the tests run as root, commands do not: others have to be allowed to read it.
    shown = tmp_path / "shown"
    shown.mkdir(mode=0o755)
    (shown / "shown.txt").write_text("shown")
    tool = ShellTool(places=("/app", "/usr"), mounts=((str(shown), "/extra"),))
    async with tool.shell({"app/x": "in the app"}) as shell:
        assert (
            await shell.run("cat /app/x /extra/shown.txt; echo y > /app/y; ls app") == "in the appshownx\ny"
        )
        assert "Read-only" in await shell.run("echo z > /extra/z")
        assert "bash" in await shell.run("ls /usr/bin")
