"""Folders that somebody else made: commands on them change no file of the user's, hang nowhere, and start
nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.config import write_toml
from agentrl.records import Journal, Outcome
from agentrl.records.history import begin_attempt
from agentrl.run.checkpoints import Checkpoints
from tests.cli.test_replay import entry
from tests.cli.test_runs import config_of
from tests.run.test_checkpoints import Saver, state

FILES = [
    *("run.lock", "attempts.jsonl", "metrics.jsonl", "diagnoses.jsonl", "status.json", "summary.json"),
    *(
        "config.toml",
        "checkpoints/step_000002/groups.jsonl",
        "trajectories/step_000001.jsonl.gz",
        "report.html",
    ),
    *("checkpoints/step_000002/state.json", "checkpoints/step_000002/checksums.json"),
]
FOLDERS = [
    "trajectories",
    "rolled_back",
    "checkpoints",
    "checkpoints/step_000002",
    "rescored",
    "view",
    "engine",
]
COMMANDS = {
    "resume": ["train", "runs/x", "--resume", "--quiet"],
    "show": ["runs", "show", "x"],
    "list": ["runs", "list"],
    "status": ["runs", "status", "x"],
    "audit": ["runs", "audit", "x"],
    "compare": ["runs", "compare", "x", "y"],
    "clean": ["runs", "clean", "x", "--force", "--rolled-back"],
    "trust": ["runs", "trust", "x", "--yes"],
    "view": ["view", "x"],
    "replay": ["replay", "x:g0-0"],
    "rescore": ["rescore", "x", "--reward", "f1"],
    "plot": ["plot", "runs/x"],
}


async def played(folder: Path) -> None:
    async with Journal(folder) as journal:
        await journal.write_step(1, [await entry("g0-0", Outcome.TRAINED)])


def made(folder: Path, **settings: object) -> Path:
    """The folder of a run that was killed after a checkpoint, as this user began it."""
    folder.mkdir(parents=True)
    config = config_of(name=folder.name, output_dir=str(folder.parent), env="Calculator-v0", **settings)
    write_toml(config, folder / "config.toml", signed=True)
    begin_attempt(folder, resumed_from=None, changes={})
    (folder / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0}\n{"step": 2, "time_s": 2.0}\n')
    asyncio.run(played(folder))
    asyncio.run(saved(folder))
    return folder


async def saved(folder: Path) -> None:
    """Write a checkpoint with sizes that would cut whatever the names lead to."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    cut = state(2).model_copy(update={"records": {"metrics.jsonl": 0, "diagnoses.jsonl": 0}})
    await checkpoints.save(Saver(), cut)
    await checkpoints.written()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with two runs, and a folder of the user's beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("x", "y"):
        made(Path("runs") / name)
    mine = tmp_path / "mine"
    mine.mkdir()
    # A last line that is not complete is what appending removes.
    (mine / "file").write_text('{"mine": 1}\n{"mine": ')
    shutil.copy(Path("runs/x/trajectories/step_000001.jsonl.gz"), mine)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def run(*arguments: str) -> int:
    """Run a command to its end; returns its exit code. It has a minute, and prints no traceback."""

    def struck(*_: object) -> None:
        raise AssertionError(f"{arguments} hangs")

    previous = signal.signal(signal.SIGALRM, struck)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return 0


def replaced(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_follows_a_link_or_waits_for_a_pipe(home, command, capsys):
    whole, x = home / "whole", Path("runs/x")
    shutil.copytree(x, whole, symlinks=True)
    before = contents(home / "mine")
    attacks = [(name, "file") for name in FILES] + [(name, ".") for name in FOLDERS]
    for name, target in [*attacks, *((name, "pipe") for name in FILES)]:
        shutil.rmtree(x)
        shutil.copytree(whole, x, symlinks=True)
        replaced(x / name)
        if target == "pipe":
            os.mkfifo(x / name)
        else:
            (x / name).symlink_to((home / "mine" / target).resolve())
        code = run(*command)
        assert contents(home / "mine") == before, (name, target)
        assert code in (0, 1, 2)
        if command == COMMANDS["resume"]:
            assert code == 2, (name, target)
            said = capsys.readouterr().err
            assert "link" in said or "neither a file nor a folder" in said or "is no file" in said, (
                name,
                said,
            )


STARTS = {
    "resume": (["train", "runs/x", "--resume"], "config.toml"),
    "resume by name": (["runs", "resume", "x"], "config.toml"),
    "dry run": (["train", "runs/x", "--dry-run"], "config.toml"),
    "replay": (["replay", "x:g0-0"], "config.toml"),
    "rescore": (["rescore", "x", "--reward", "f1", "--step-rewards", "again"], "config.toml"),
    "benchmark": (["benchmark", "runs/x", "--resume"], "suite.toml"),
}


@pytest.mark.parametrize(("command", "file"), STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("came", ["downloaded", "changed"])
def test_what_a_folder_names_is_started_after_it_was_trusted_and_not_before(
    home, monkeypatch, capsys, command, file, came
):
    monkeypatch.syspath_prepend(home)
    started = home / "started"
    (home / "theirs.py").write_text(
        f"open({str(started)!r}, 'a').write('x')\nfrom agentrl.envs.registry import make\n"
        "def Env(**settings): return make('Calculator-v0')\n"
    )
    sys.modules.pop("theirs", None)
    x = Path("runs/x")
    if file == "suite.toml":
        (x / file).write_text('[[env]]\nid = "theirs:Env"\n\n[[model]]\nmodel = "random"\n')
    else:
        text = (x / file).read_text()
        unsigned = text if came == "changed" else text.partition("\n")[2]
        (x / file).write_text(unsigned.replace('"Calculator-v0"', '"theirs:Env"'))
    assert run(*command) == 2
    said = capsys.readouterr().err
    assert f"{file} may start anything, and it was not written for this user, or was changed since" in said
    assert "`agentrl runs trust runs/x` lists what it names, and trusts it with --yes." in said
    assert not started.exists()
    # Only listed.
    assert run("runs", "trust", "x") == 0
    assert "theirs:Env" in capsys.readouterr().out
    assert run(*command) == 2
    assert not started.exists()
    assert run("runs", "trust", "x", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["trusted"] is True
    run(*command)
    assert started.exists()


# Only root can give a folder away.
@pytest.mark.parametrize("user", [65534] if os.geteuid() == 0 else [])
def test_a_folder_of_another_user_is_read_and_not_written(home, capsys, user):
    x = Path("runs/x")
    for path in (x, *x.rglob("*")):
        os.chown(path, user, user)
    before = contents(x)
    for name in ("show", "audit", "compare"):
        run(*COMMANDS[name])
        assert "belongs to" not in capsys.readouterr().err
    for name in ("resume", "clean", "trust", "rescore", "view"):
        assert run(*COMMANDS[name]) == 2, name
        assert "belongs to nobody, another user; " in capsys.readouterr().err
    assert {k: v for k, v in contents(x).items() if not k.endswith("run.lock")} == before
    assert run("view", "x", "--out", "pages") == 0
