"""A run whose engine or trainer is killed resumes by itself, and ends as one that was not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from itertools import count

import pytest

import agentrl
from agentrl.errors import EngineDiedError, TrainerError, UserError
from agentrl.records.history import attempts
from agentrl.records.status import read_status
from agentrl.runtime.activity import LOADS_STATE, READS, STARTS_ENGINE, STARTS_RANKS
from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import train
from tests.flow.sft import conversations, sft
from tests.flow.test_resume import SMALL, same, weights_of
from tests.flow.worlds import Struck
from tests.trainer.megatron.launching import descendants, ranks_of, words_of

IN_PROCESSES = {**SMALL, "inline": False, "num_rollout": 4, "save_interval": 1, "num_threads": 1}


def kill_the_rank_in_its_third_step(monkeypatch):
    """The call is on its way to a rank that stands still; then the rank is killed."""
    update, steps, struck = RankTrainer.update, count(1), []

    def kill(rank):
        time.sleep(0.5)
        os.kill(rank, signal.SIGKILL)

    async def updated(self, batch):
        if next(steps) == 3:
            (rank,) = ranks_of(os.getpid())
            struck.append(rank)
            os.kill(rank, signal.SIGSTOP)
            threading.Thread(target=kill, args=(rank,)).start()
        return await update(self, batch)

    monkeypatch.setattr(RankTrainer, "update", updated)
    return struck


def engine_of(pid):
    """The process of the embedded engine that a process has started."""
    (engine,) = [child for child in descendants(pid) if b"agentrl.engine.embedded" in words_of(child)]
    return engine


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody struck."""
    Struck.at = None
    return train("Struck", tmp_path_factory.mktemp("whole"), "x", **IN_PROCESSES).folder


def test_a_run_whose_trainer_is_killed_resumes_by_itself(whole, tmp_path, monkeypatch, capsys):
    Struck.at = None
    struck = kill_the_rank_in_its_third_step(monkeypatch)
    folder = train("Struck", tmp_path, "x", quiet=False, max_restarts=1, **IN_PROCESSES).folder
    assert len(struck) == 1
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "finished"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "was ended by SIGKILL" in shown
    assert "The run resumes by itself (1 of 1)." in shown
    same(folder, whole)


@pytest.mark.full
def test_a_run_whose_engine_is_killed_resumes_by_itself(whole, tmp_path, monkeypatch):
    """While it samples for the other episodes of the group, whose requests get no reply."""
    engines = []

    async def strike(self):
        engines.append(engine_of(os.getpid()))
        os.kill(engines[0], signal.SIGKILL)

    monkeypatch.setattr(Struck, "strike", strike)
    Struck.at, Struck.resets = 30, 0
    folder = train("Struck", tmp_path, "x", max_restarts=3, **IN_PROCESSES).folder
    assert len(engines) == 1
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "finished"]
    same(folder, whole)


@pytest.mark.full
def test_sft_whose_trainer_is_killed_resumes_by_itself(tmp_path, monkeypatch):
    conversations(tmp_path / "c.jsonl", number=80)
    settings = {"inline": False, "sft_data": str(tmp_path / "c.jsonl"), "save_interval": 1, "num_threads": 1}
    untouched = sft(tmp_path, name="untouched", **settings).folder
    struck = kill_the_rank_in_its_third_step(monkeypatch)
    folder = sft(tmp_path, name="struck", max_restarts=1, **settings).folder
    assert len(struck) == 1
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "finished"]
    assert weights_of(folder) == weights_of(untouched)


@pytest.mark.full
def test_a_run_that_fails_each_time_ends_with_its_last_failure(tmp_path, monkeypatch):
    async def dies(self, batch):
        (rank,) = ranks_of(os.getpid())
        os.kill(rank, signal.SIGKILL)
        return await update(self, batch)

    update = RankTrainer.update
    monkeypatch.setattr(RankTrainer, "update", dies)
    Struck.at = None
    with pytest.raises(TrainerError, match="SIGKILL"):
        train("Struck", tmp_path, "x", max_restarts=1, **IN_PROCESSES)
    assert [attempt.ended for attempt in attempts(tmp_path / "x")] == ["failed", "failed"]


@pytest.mark.full
def test_without_restarts_a_killed_engine_ends_the_run(tmp_path, monkeypatch):
    async def strike(self):
        os.kill(engine_of(os.getpid()), signal.SIGKILL)

    monkeypatch.setattr(Struck, "strike", strike)
    Struck.at, Struck.resets = 12, 0
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        train("Struck", tmp_path, "x", **IN_PROCESSES)
    assert [attempt.ended for attempt in attempts(tmp_path / "x")] == ["failed"]


def test_a_resume_says_what_it_did_before_its_first_iteration_and_how_long_each_part_took(
    tmp_path, monkeypatch
):
    Struck.at, Struck.resets = 36, 0
    with pytest.raises(UserError, match="struck"):
        train("Struck", tmp_path, "x", **SMALL)
    starts: list[dict[str, float]] = []

    async def look(self):
        # The status is that of the second in which it is written.
        while LOADS_STATE not in (start := read_status(tmp_path / "x").start):
            await asyncio.sleep(0.05)
        starts.append(start)

    monkeypatch.setattr(Struck, "strike", look)
    Struck.at, Struck.resets = 3, 0
    agentrl.train(tmp_path / "x", quiet=True)
    Struck.at = None
    (start,) = starts
    assert next(iter(start)) == READS
    assert {STARTS_ENGINE, STARTS_RANKS, LOADS_STATE} <= start.keys()
    assert all(seconds > 0 for seconds in start.values())
    assert read_status(tmp_path / "x").start == {}
