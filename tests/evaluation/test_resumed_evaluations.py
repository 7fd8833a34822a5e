"""`agentrl eval`, interrupted in mid-play: what was paid for stays, and `--resume` goes on from there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

import pytest

import agentrl
from agentrl.cli import main
from agentrl.errors import ConfigError, RunBusyError, RunExistsError
from agentrl.records import members, read_journal, reconcile
from agentrl.records.history import locked
from tests.disks import file_size_limit
from tests.engine.chat.chat_server import ChatServer, expert_of
from tests.records.test_history import contents

ENV, N = "Calculator-v0", 24
CONCURRENCY = 4


class Endpoint(ChatServer):
    """The expert of the environment, in a thread. It sends the process a signal at the request `at`."""

    def __init__(self):
        super().__init__(expert_of(agentrl.make(ENV), "test"))
        self.at, self.number = 0, signal.SIGINT

    def body(self, request):
        if self.counts["requests"] == self.at:
            os.kill(os.getpid(), self.number)
        return super().body(request)

    def strike(self, after, number):
        """Strike so many requests from now."""
        self.at, self.number = self.counts["requests"] + after, number

    @contextmanager
    def in_thread(self):
        started, done = threading.Event(), asyncio.Event()

        async def serve():
            self.loop = asyncio.get_running_loop()
            async with self.serving():
                started.set()
                await done.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        started.wait()
        try:
            yield self
        finally:
            self.loop.call_soon_threadsafe(done.set)
            thread.join()


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with Endpoint().in_thread() as endpoint:
        yield endpoint


def evaluated(endpoint, folder=None, **settings):
    options = {"openai_url": endpoint.url, "openai_model": "m", "n": N, "openai_concurrency": CONCURRENCY}
    place = {} if folder is None else {"output_dir": str(folder)}
    return agentrl.evaluate(ENV, quiet=True, **{**options, **place, **settings})


def command(endpoint, folder, *words):
    """The exit code of a command line."""
    flags = (f"--openai-url={endpoint.url}", "--openai-model=m", f"--openai-concurrency={CONCURRENCY}")
    try:
        main(["eval", ENV, *flags, f"--n={N}", f"--output-dir={folder}", *words])
    except SystemExit as ended:
        return ended.code
    return 0


def ids_in(folder):
    """The episodes in the journal, which holds complete entries, each once."""
    assert reconcile(folder).problems == ()
    (path,) = (folder / "trajectories").iterdir()
    assert path.stat().st_size == members.end_of_members(path)
    return {entry.episode.id for entry in read_journal(path)}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_goes_on_with_resume(endpoint, tmp_path, capsys, number, code):
    folder = tmp_path / "out"
    endpoint.strike(20, number)
    assert command(endpoint, folder) == code
    kept = ids_in(folder)
    assert 0 < len(kept) < N
    text = capsys.readouterr()
    assert f"Stopped after {len(kept)} of {N} episodes." in text.err
    assert f"--output-dir {folder} and --resume" in text.err
    assert "Traceback" not in text.out + text.err

    before = contents(folder)
    assert command(endpoint, folder) == 2
    assert "has not ended; go on with --resume, choose" in capsys.readouterr().err
    assert command(endpoint, folder, "--resume", "--temperature=0.5") == 2
    sentence = "was begun with temperature = 1.0, and that cannot become 0.5 when it goes on"
    assert sentence in capsys.readouterr().err
    assert {k: v for k, v in contents(folder).items() if "run.lock" not in k} == {
        k: v for k, v in before.items() if "run.lock" not in k
    }

    num_requests = endpoint.counts["requests"]
    assert command(endpoint, folder, "--resume", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["n"], report["mean"]) == (N, 1.0)
    assert report == json.loads((folder / "report.json").read_text())
    assert ids_in(folder) == {f"e{k}" for k in range(N)}
    turns = report["counts"]["chat/requests"]
    paid_before = sum(
        len(entry.episode.turns)
        for entry in read_journal(folder / "trajectories" / "eval_test_000000.jsonl.gz")
        if entry.episode.id in kept
    )
    # One request more, which checks the endpoint.
    assert endpoint.counts["requests"] - num_requests == turns - paid_before + 1

    num_requests = endpoint.counts["requests"]
    assert command(endpoint, folder, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out) == report
    assert endpoint.counts["requests"] == num_requests, "it has ended: nothing is played"


def test_without_a_folder_a_temporary_one_keeps_what_was_paid_for(endpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert evaluated(endpoint).n == N
    assert list(tmp_path.iterdir()) == [], "an evaluation that has ended leaves nothing"
    endpoint.strike(20, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        evaluated(endpoint)
    (folder,) = tmp_path.iterdir()
    kept = ids_in(folder)
    sentence = f"Stopped after {len(kept)} of {N} episodes. Go on from there with the same settings, "
    assert f"{sentence}--output-dir {folder} and --resume." in capsys.readouterr().err
    num_requests = endpoint.counts["requests"]
    report = evaluated(endpoint, folder, resume=True)
    assert (report.n, report.mean) == (N, 1.0)
    assert endpoint.counts["requests"] - num_requests < report.counts["chat/requests"]


def test_a_killed_evaluation_keeps_its_episodes_and_the_next_one_says_where(
    endpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    endpoint.behaviours = [*[None] * 20, *["hang"] * CONCURRENCY]
    flags = (f"--openai-url={endpoint.url}", "--openai-model=m", f"--openai-concurrency={CONCURRENCY}")
    main_of = "import sys; from agentrl.cli import main; main(sys.argv[1:])"
    program = [sys.executable, "-c", main_of, "eval", ENV, *flags, f"--n={N}"]
    process = subprocess.Popen(
        program, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    while not list(tmp_path.glob("*/trajectories/*")) or endpoint.behaviours:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    (folder,) = tmp_path.iterdir()
    kept = ids_in(folder)
    assert kept
    agentrl.evaluate(
        ENV, openai_url=endpoint.url, openai_model="m", n=2, openai_concurrency=CONCURRENCY, quiet=False
    )
    assert f"{folder} holds the episodes of an evaluation that was killed." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [folder]
    assert evaluated(endpoint, folder, resume=True).n == N
    assert kept < ids_in(folder)


def test_an_interrupt_before_an_episode_has_ended_leaves_nothing(endpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    endpoint.behaviours = [None, *["hang"] * CONCURRENCY]
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        evaluated(endpoint)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_resume_begins_an_evaluation_that_has_not_begun(endpoint, tmp_path):
    assert evaluated(endpoint, tmp_path / "new", n=2, resume=True).n == 2


def test_the_server_may_have_moved_and_the_tasks_may_not(endpoint, tmp_path, monkeypatch):
    endpoint.strike(20, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        evaluated(endpoint, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("agentrl.evaluation.model.data_fingerprint", lambda tasks: "other")
        with pytest.raises(ConfigError, match="was begun with other tasks, and that cannot change when it"):
            evaluated(endpoint, tmp_path, resume=True)
    with Endpoint().in_thread() as moved:
        assert evaluated(moved, tmp_path, resume=True).n == N


def test_a_second_evaluation_in_the_folder_is_refused_before_it_writes(endpoint, tmp_path):
    with locked(tmp_path):
        before = contents(tmp_path)
        for resume in (False, True):
            with pytest.raises(RunBusyError, match=rf"another process works on {tmp_path} \(process"):
                evaluated(endpoint, tmp_path, resume=resume)
        assert contents(tmp_path) == before
    assert endpoint.counts["requests"] == 0


def test_a_full_disk_is_one_sentence_and_exit_code_2(endpoint, tmp_path, capsys):
    folder = tmp_path / "out"
    with file_size_limit(2500):
        assert command(endpoint, folder) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert re.search(
        r"^agentrl: .*eval_test_000000\.jsonl\.gz cannot be written \(File too large\);", text, re.M
    )
    assert "Traceback" not in text
    kept = ids_in(folder)
    assert 0 < len(kept) < N
    assert command(endpoint, folder, "--resume", "--json") == 0
    assert ids_in(folder) == {f"e{k}" for k in range(N)}


def test_a_disk_that_takes_no_report_keeps_the_episodes(endpoint, tmp_path):
    folder = tmp_path / "out"
    (folder / "report.json.part").mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        evaluated(endpoint, folder)
    (folder / "report.json.part").rmdir()
    num_requests = endpoint.counts["requests"]
    assert evaluated(endpoint, folder, resume=True).n == N
    assert endpoint.counts["requests"] == num_requests + 1


@pytest.mark.full
def test_a_full_standard_output_is_one_sentence(endpoint, tmp_path):
    folder = tmp_path / "out"
    evaluated(endpoint, folder)
    words = [
        "eval",
        ENV,
        f"--openai-url={endpoint.url}",
        "--openai-model=m",
        f"--n={N}",
        "--resume",
        "--json",
    ]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "agentrl.cli", *words, "--openai-concurrency=4", f"--output-dir={folder}"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr == (
        "agentrl: the output cannot be written (No space left on device); make room there, or make it "
        "writable.\n"
    )


@pytest.mark.parametrize(
    ("names", "settings", "error", "sentence"),
    [
        ((), {"resume": True}, ConfigError, "resume goes on with the evaluation in output_dir; name that"),
        (("attempts.jsonl",), {}, RunExistsError, "holds a run of another command"),
        (
            ("trajectories/x", "report.json"),
            {},
            RunExistsError,
            "already holds episodes; see .* --resume",
        ),
        (("trajectories/x",), {"resume": True}, ConfigError, r"identity\.json cannot be read"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_sentence(tmp_path, names, settings, error, sentence):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    folder = {"output_dir": str(tmp_path)} if names else {}
    with pytest.raises(error, match=sentence):
        agentrl.evaluate(
            ENV, quiet=True, openai_url="http://127.0.0.1:9/v1", openai_model="m", **folder, **settings
        )
