"""An agent that is a program goes where every environment does: eval, benchmark, asynchronous runs, kills."""

from __future__ import annotations

import json
import signal
import time

import pytest

import agentrl
from agentrl import Limits, Task
from agentrl.cli import main
from agentrl.envs.gateway import HarnessEnv
from agentrl.records import read_journal, reconcile
from agentrl.records.history import attempts
from agentrl.run.audit import audit
from agentrl.tools.shell import ShellTool
from tests.flow.runs import TINY, train
from tests.flow.test_asynchronous import staleness_of
from tests.flow.test_resume import accounted, newest, started

pytestmark = pytest.mark.full

PROGRAM = """
import json, os, urllib.request

head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
messages = [{"role": "user", "content": open("question.txt").read()}]
for _ in range(2):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 16}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "Sure?"}]
open("answer.txt", "w").write(message["content"])
"""


class Programs(HarnessEnv):
    """A program that asks twice; about half of the answers of a model that knows nothing are right."""

    id = "Programs-v0"
    program = "python agent.py"
    shell = ShellTool(timeout_s=60, memory_mb=128, max_concurrency=32)
    limits = Limits(max_turns=2, max_tokens=192, reset_timeout_s=None, step_timeout_s=None)

    def tasks(self, split):
        return [Task.ask(f"{split}-{number}", f"{number}?") for number in range(32)]

    def files(self, task):
        return {"agent.py": PROGRAM, "question.txt": task.prompt[0].text}

    def grade(self, task, answer, files):
        return float(len(files.get("answer.txt", "")) % 2)


ENV = f"{__name__}:Programs"
SMALL = {
    **TINY,
    "env": ENV,
    "num_rollout": 3,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "eval_interval": 1000,
    "eval_episodes": 2,
    "save_interval": 1,
    "use_tensorboard": False,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, which updated its weights."""
    return train("", tmp_path_factory.mktemp("runs"), "x", **SMALL).folder


def entries_of(folder, pattern="step_*"):
    """The journalled episodes, each with its two turns."""
    files = sorted(folder.rglob(f"trajectories/{pattern}.jsonl.gz"))
    entries = [entry for file in files for entry in read_journal(file)]
    for entry in entries:
        assert entry.episode.failure is None, entry.episode.failure
        assert entry.episode.counts["requests"] == 2
        assert len(entry.episode.turns) == 2
    return entries


def test_a_program_is_evaluated(run, tmp_path):
    report = agentrl.evaluate(
        ENV, str(run / "checkpoint"), n=6, quiet=True, output_dir=str(tmp_path / "out"), max_slots=4
    )
    entries = entries_of(tmp_path / "out", "*")
    assert len(entries) == 6
    mean = sum(entry.episode.step_rewards[-1] or 0.0 for entry in entries) / 6
    assert report.mean == pytest.approx(mean)


def test_a_program_is_a_row_of_a_benchmark(run, tmp_path, capsys):
    folder = tmp_path / "bench"
    models = ["--model", str(run / "checkpoint"), "--model", "null"]
    main(["benchmark", ENV, *models, "--n=4", f"--output-dir={folder}", "--max-slots=4", "--json"])
    assert len(entries_of(folder, "*")) == 8
    table = json.loads(capsys.readouterr().out)
    means = {row["policy"]: row["mean"]["value"] for row in table["rows"]}
    assert means["null"] == 0.0
    assert 0.0 <= means[next(name for name in means if name != "null")] <= 1.0


def test_programs_play_while_others_are_trained(tmp_path):
    late = {"max_staleness": 1, "correction": "tis", "num_rollout": 5}
    folder = train("", tmp_path, "x", **{**SMALL, **late}).folder
    staleness = [stale_T for stale_T in staleness_of(folder) if len(stale_T)]
    assert all(stale_T.min() >= 0 and stale_T.max() <= 1 for stale_T in staleness)
    assert max(stale_T.max() for stale_T in staleness) == 1, "groups were in flight while others were trained"
    entries_of(folder)
    found = accounted(folder)
    assert found.trained + sum(found.dropped.values()) >= 5 * 2


def test_a_killed_run_of_programs_goes_on(tmp_path):
    folder, number = tmp_path / "x", 4
    process = started(tmp_path, "--inline", **{**SMALL, "num_rollout": number})
    deadline = time.monotonic() + 400
    while newest(folder) < 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    agentrl.train(folder, quiet=True)
    first, second = attempts(folder)
    assert second.ended == "finished"
    assert second.resumed_from is not None
    assert 1 <= second.resumed_from < number, first
    assert audit(folder).problems == reconcile(folder).problems == ()
    assert len(list((folder / "trajectories").glob("step_*.jsonl.gz"))) == number
    assert len({entry.episode.id for entry in entries_of(folder)}) == len(entries_of(folder)) == number * 8
