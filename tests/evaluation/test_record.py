"""An evaluation keeps what it has played, however it ends; it goes on from there, and plays nothing twice."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from agentrl import GroupReward, Reward
from agentrl.errors import ConfigError, DiskError
from agentrl.evaluation import episodes
from agentrl.evaluation.record import EpisodeRecord
from agentrl.records import members, read_journal, reconcile
from agentrl.runtime.interrupts import run_until_signal
from tests.disks import file_size_limit
from tests.evaluation.test_episodes import TASKS, evaluator

REWARDS = (
    Reward(lambda episode: float(len(episode.turns)), weight=0.5, name="turns"),
    GroupReward(lambda siblings: [float(len(siblings))] * len(siblings), weight=0.1, name="size"),
)
SIGNALS = [signal.SIGINT, signal.SIGTERM]
N, SAMPLES, CONCURRENCY = 30, 2, 3


class Clock:
    """Stands in for `time`: it goes when it is advanced."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def strike_at(reset, number):
    """Sends this process a signal in the given reset, while other episodes are in progress."""

    def on_reset(count):
        if count == reset:
            os.kill(os.getpid(), number)

    return on_reset


def played(record, on_reset=lambda _: None, n=N, **options):
    """One attempt, interrupted or not: the evaluation, the number of resets, the progress."""
    progress = []
    options = {"concurrency": CONCURRENCY, "rewards": REWARDS, "failing": {"t2"}, **options}
    judge, resets = evaluator(progress=progress.append, **options)
    resets.on_reset = on_reset
    evaluation = None
    try:
        evaluation = run_until_signal(judge.run(TASKS, n, seed=0, samples=SAMPLES, record=record))
    except (KeyboardInterrupt, SystemExit):
        assert resets.running == 0, "every environment is closed"
    return evaluation, len(resets.log), sum(progress)


def ids_in(record):
    """The episodes in the journal, which holds complete entries, each once."""
    assert reconcile(record.folder).problems == ()
    assert record.path.stat().st_size == members.end_of_members(record.path)
    return [entry.episode.id for entry in read_journal(record.path)]


def facts_of(evaluation):
    """All but what takes time."""
    scores = [(v.episode_id, v.total, dict(v.parts)) for v in evaluation.verdicts]
    return replace(evaluation.report, seconds=0.0), scores, [episode.id for episode in evaluation.episodes]


@pytest.fixture(scope="module")
def undisturbed():
    return facts_of(played(None)[0])


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_evaluation_goes_on_and_ends_as_one_that_was_not(tmp_path, undisturbed, number):
    record = EpisodeRecord(tmp_path, "test")
    evaluation, num_resets, num_ended = played(record, strike_at(25, number))
    assert evaluation is None
    assert 25 <= num_resets <= 25 + CONCURRENCY
    first = ids_in(record)
    assert num_resets - CONCURRENCY <= len(first) < num_resets, "some were in progress"
    assert num_ended <= len(first)
    evaluation, num_resets, num_ended = played(record)
    assert (num_resets, num_ended) == (N * SAMPLES - len(first), N * SAMPLES)
    assert facts_of(evaluation) == undisturbed
    assert ids_in(record) == [episode.id for episode in evaluation.episodes]
    sizes = [entry.verdict.parts["size"] for entry in read_journal(record.path) if entry.verdict]
    assert set(sizes) == {2.0}, "rewards of groups, once all siblings have ended"


def test_what_is_complete_is_not_played_again(tmp_path, undisturbed):
    record = EpisodeRecord(tmp_path, "test")
    played(record)
    evaluation, num_resets, num_ended = played(record)
    assert (num_resets, num_ended) == (0, N * SAMPLES)
    assert facts_of(evaluation) == undisturbed


def test_the_time_is_that_of_all_attempts(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("agentrl.evaluation.record.time", clock)
    monkeypatch.setattr(episodes, "time", clock)
    record = EpisodeRecord(tmp_path, "test")
    seconds = []

    def on_reset(count):
        clock.advance(10.0)
        seconds.append(record.seconds)
        if count == 25:
            os.kill(os.getpid(), signal.SIGINT)

    assert played(record, on_reset)[0] is None
    first = record.seconds
    assert first == clock.now >= 250.0
    assert first - 100.0 < seconds[-1] < first, "an attempt that is killed has most of it, too"
    evaluation, num_resets, _ = played(record, lambda count: clock.advance(1.0))
    assert evaluation.report.seconds == first + num_resets == record.seconds
    assert played(record)[0].report.seconds == record.seconds, "nothing was played"
    (tmp_path / "eval_test_000000.seconds").write_text("long")
    with pytest.raises(ConfigError, match=r"eval_test_000000.seconds cannot be read .*; remove it, which"):
        played(record)


def test_a_full_disk_ends_it_in_one_sentence_and_it_goes_on_from_there(tmp_path, undisturbed):
    record = EpisodeRecord(tmp_path, "test")
    counts = []
    sentence = rf"^{record.path} cannot be written \(File too large\); make room.*not in the journal\.$"
    with file_size_limit(3000), pytest.raises(DiskError, match=sentence):
        played(record, counts.append)
    assert counts[-1] < N * SAMPLES, "no episode is paid for that cannot be kept"
    first = ids_in(record)
    assert 0 < len(first) < counts[-1]
    evaluation, num_resets, _ = played(record)
    assert num_resets == N * SAMPLES - len(first)
    assert facts_of(evaluation) == undisturbed


@pytest.mark.parametrize("number", SIGNALS)
def test_200_000_episodes_end_within_two_seconds_of_an_interrupt(tmp_path, number):
    struck = []

    def on_reset(count):
        if count == 600:
            struck.append(time.process_time())
            os.kill(os.getpid(), number)

    record = EpisodeRecord(tmp_path, "test")
    evaluation, num_resets, num_ended = played(record, on_reset, n=100_000, concurrency=256, rewards=())
    # Seconds of computing: other work on the machine does not decide.
    assert time.process_time() - struck[0] < 2.0
    assert evaluation is None
    assert num_resets - 256 <= len(ids_in(record)) < num_resets
    assert num_ended <= num_resets


def test_an_interrupt_takes_effect_while_the_record_is_read(tmp_path, monkeypatch):
    record = EpisodeRecord(tmp_path, "test")
    played(record, n=200, failing=())
    num_read = 0

    def striking(path):
        nonlocal num_read
        for entry in read_journal(path):
            num_read += 1
            if num_read == 100:
                os.kill(os.getpid(), signal.SIGINT)
            yield entry

    monkeypatch.setattr("agentrl.evaluation.record.read_journal", striking)
    assert played(record, n=200) == (None, 0, 0)
    assert 100 <= num_read < 200


def test_an_interrupt_takes_effect_while_many_episodes_are_counted(monkeypatch):
    began = []

    def summarize(*args, **options):
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3.0)

    monkeypatch.setattr(episodes, "summarize", summarize)
    assert played(None)[0] is None
    assert time.monotonic() - began[0] < 2.0


async def test_episodes_of_other_plans_stay_in_the_journal_and_out_of_the_result(tmp_path):
    record = EpisodeRecord(tmp_path, "test")
    judge, _ = evaluator()
    await judge.run(TASKS, 6, seed=0, record=record)
    evaluation = await judge.run(TASKS, 3, seed=0, record=record)
    assert [episode.id for episode in evaluation.episodes] == ["e0", "e1", "e2"]
    assert len(ids_in(record)) == 6


async def test_a_broken_journal_is_a_sentence_and_stays_as_it_is(tmp_path):
    record = EpisodeRecord(tmp_path, "test")
    record.path.parent.mkdir()
    record.path.write_bytes(b"no journal")
    judge, _ = evaluator()
    with pytest.raises(ConfigError, match=r"cannot be read .* restore it, or remove that folder"):
        await judge.run(TASKS, 3, seed=0, record=record)
    assert record.path.read_bytes() == b"no journal"


def test_episodes_are_on_disk_while_others_are_still_to_come(tmp_path):
    record = EpisodeRecord(tmp_path, "test")
    num_recorded = 0

    def on_reset(count):
        nonlocal num_recorded
        deadline = time.monotonic() + 10.0
        while count == N * SAMPLES and num_recorded < count - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
            num_recorded = len(ids_in(record))

    played(record, on_reset, concurrency=1)
    assert num_recorded == N * SAMPLES - 1
