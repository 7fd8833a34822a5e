"""Updates of the weights that really fail half-way: a run ends with the cause, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest

import agentrl
from agentrl.engine.embedded.messages import Begin, Commit, Put
from agentrl.engine.embedded.process import EngineProcess
from agentrl.errors import EngineDiedError, EngineError
from agentrl.records import reconcile
from agentrl.records.history import attempts
from agentrl.run.checkpoints import Checkpoints
from agentrl.weights.staging import Transaction
from tests.flow.runs import train
from tests.flow.test_asynchronous import LATE, accounted_for, steps_of, versions_of
from tests.flow.test_resume import SMALL, accounted, same

VERSION = 3
"""That of the update which fails."""


class Fault(NamedTuple):
    """What becomes of a message of the update, and the error that a run then ends with."""

    of: type
    act: Callable[[EngineProcess, Put | Commit], Put | Commit]
    error: type[Exception]
    sentence: str


def killed(process, message):
    os.kill(process.pid, signal.SIGKILL)
    return message


def without_its_memory(process, put):
    """The thread that handles updates in the engine's process cannot map a bucket."""
    return put._replace(descriptor=1_000_000)


def damaged(process, commit):
    return commit._replace(checksum=commit.checksum ^ 1)


DIED = r"the embedded engine \(process \d+\) "
FAULTS = {
    "killed": Fault(Put, killed, EngineDiedError, DIED + r"was ended by SIGKILL; see .*engine\.log"),
    "killed at the commit": Fault(Commit, killed, EngineDiedError, DIED + "was ended by SIGKILL"),
    "the thread fails": Fault(Put, without_its_memory, EngineDiedError, DIED + ".*RuntimeError: .*/1000000>"),
    "damaged": Fault(
        Commit, damaged, EngineError, f"version {VERSION} arrived damaged .* the old version stays"
    ),
}
RUNS = {
    "synchronous": {**SMALL, "enable_deterministic_inference": True},
    "asynchronous": {**LATE, "num_rollout": 5},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The synchronous run, in which no update fails."""
    settings = {**RUNS["synchronous"], "inline": False}
    return train("Talkative", tmp_path_factory.mktemp("whole"), "x", **settings).folder


def broken(monkeypatch, fault):
    """One update fails: the first one to `VERSION`. Others of the run are as they are."""
    post, versions = EngineProcess.post, [0]

    def posted(process, message):
        if isinstance(message, Begin):
            versions.append(message.version)
        if isinstance(message, fault.of) and versions[-1] == VERSION and versions.count(VERSION) == 1:
            versions.append(-1)
            message = fault.act(process, message)
        return post(process, message)

    monkeypatch.setattr(EngineProcess, "post", posted)
    return versions


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_ends_with_the_cause_and_goes_on_where_it_was(tmp_path, monkeypatch, request, kind, name):
    fault, folder = FAULTS[name], tmp_path / "x"
    versions = broken(monkeypatch, fault)
    with pytest.raises(fault.error, match=fault.sentence) as failed:
        train("Talkative", tmp_path, "x", inline=False, **RUNS[kind])
    assert type(failed.value) is fault.error
    assert -1 in versions
    assert_nothing_is_lost(folder)
    if kind == "synchronous":
        same(folder, request.getfixturevalue("whole"))


def assert_nothing_is_lost(folder):
    """A run whose update to `VERSION` failed, and what becomes of it when it is resumed."""
    assert [attempt.ended for attempt in attempts(folder)] == ["failed"]
    assert json.loads((folder / "summary.json").read_text())["ended"] == "failed"
    # No token is of weights that never served, and every prompt is somewhere.
    sampled = {version for step in steps_of(folder) for e in step for v in versions_of(e) for version in v}
    assert max(sampled) < VERSION
    assert accounted_for(folder).trained >= 2 * 2
    assert Checkpoints(folder / "checkpoints", keep=1).newest().state.version < VERSION
    agentrl.train(folder, quiet=True)
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "finished"]
    assert reconcile(folder).problems == ()
    found = accounted(folder)
    assert found.trained + sum(found.dropped.values()) == found.started >= 5 * 2


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_whose_engine_refuses_an_update_ends_with_the_cause_and_goes_on(tmp_path, monkeypatch, kind):
    commit, refused = Transaction.commit, []

    async def damaged_once(transaction, checksum):
        if transaction._version == VERSION and not refused:
            refused.append(VERSION)
            checksum ^= 1
        await commit(transaction, checksum)

    monkeypatch.setattr(Transaction, "commit", damaged_once)
    with pytest.raises(EngineError, match=FAULTS["damaged"].sentence):
        train("Talkative", tmp_path, "x", **RUNS[kind])
    assert refused == [VERSION]
    assert_nothing_is_lost(tmp_path / "x")
