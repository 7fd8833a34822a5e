"""Runs in which groups are played while others are trained: staleness, publishing, resume, accounts."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest

import agentrl
from agentrl.errors import UserError
from agentrl.records import Outcome, read_journal, reconcile
from agentrl.records.history import attempts
from agentrl.records.status import read_status
from agentrl.rollout.saved import read_lines
from agentrl.run.audit import audit
from agentrl.run.checkpoints import Checkpoints
from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import WARM, metrics_of, train
from tests.flow.test_replay import learned, replay_of
from tests.flow.test_resume import SMALL, accounted, newest, started, weights_of
from tests.flow.worlds import Struck

LATE = {**SMALL, "max_staleness": 1, "correction": "tis", "num_rollout": 8}


def steps_of(folder):
    """The entries of each iteration, in order."""
    return [list(read_journal(path)) for path in sorted((folder / "trajectories").glob("step_*.jsonl.gz"))]


def versions_of(entry):
    """The version of each sampled token of a journalled episode, by turn."""
    return [turn.tokens.completion.versions for t in entry.episode.trajectories for turn in t.turns]


def served_versions(folder, *, interval=1):
    """The version that was served while each iteration trained, and the one after the last."""
    version, is_new, served = 0, False, [0]
    for number, entries in enumerate(steps_of(folder), start=1):
        is_new |= any(entry.outcome is Outcome.TRAINED for entry in entries)
        if is_new and number % interval == 0:
            version, is_new = version + 1, False
        served.append(version)
    return served


def staleness_of(folder, **options):
    """For each iteration the staleness of all trained tokens (versions)."""
    return [
        np.concatenate([served - np.concatenate(versions_of(e)) for e in entries if e.outcome == "trained"])
        if any(entry.outcome == "trained" for entry in entries)
        else np.zeros(0)
        for served, entries in zip(served_versions(folder, **options), steps_of(folder), strict=False)
    ]


def oldest(served, entries):
    """The staleness of the oldest token of a batch (versions)."""
    return max(served - np.concatenate(versions_of(e)).min() for e in entries if e.verdicts and e.in_batch)


def asynchronous(tmp_path, name="x", **settings):
    return train("Talkative", tmp_path, name, **{**LATE, **settings}).folder


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"staleness_policy": "strict"}, 1),
        # N + ceil((W - 1) / P)
        ({"max_staleness": 2, "staleness_window": 3}, 3),
        ({"staleness_policy": "ready_first"}, 1),
        ({"over_sampling_batch_size": 3, "max_staleness": 0, "partial_rollout": True}, 1),
    ],
    ids=["strict", "window", "ready_first", "partial rollout"],
)
def test_tokens_are_trained_within_the_bound_and_every_prompt_is_accounted_for(tmp_path, settings, bound):
    folder = asynchronous(tmp_path, **settings)
    staleness = staleness_of(folder)
    assert len(staleness) == 8
    assert all(stale_T.min() >= 0 and stale_T.max() <= bound for stale_T in staleness if len(stale_T))
    # Groups were in flight while others were trained.
    assert max(stale_T.max() for stale_T in staleness if len(stale_T)) > 0
    logged = [row["rollout/staleness/max"] for row in metrics_of(folder) if "rollout/staleness/max" in row]
    assert logged == list(map(oldest, served_versions(folder), steps_of(folder)))
    assert max(row.get("perf/overlap_time_ratio", 0.0) for row in metrics_of(folder)) > 0
    last = read_status(folder).staleness
    assert sum(last.flight.values()) == sum(last.queue.values()) == 2
    assert max(last.flight) <= max(staleness[-1]) <= max(last.flight) + max(last.queue)
    found = accounted(folder)
    assert (found.ahead, found.saved) == (0, 0)
    assert found.trained + found.dropped.get("zero_std", 0) == 8 * 2
    assert set(found.dropped) <= {"zero_std", "stale"}


def test_without_partial_rollout_no_trajectory_spans_an_update(tmp_path):
    whole = [
        v
        for entries in steps_of(asynchronous(tmp_path, partial_rollout=False))
        for v in map(versions_of, entries)
    ]
    assert all(len(set(np.concatenate(versions))) == 1 for versions in whole)


def test_several_iterations_share_a_version(tmp_path):
    folder = asynchronous(tmp_path, update_weights_interval=3)
    steps = [row["train/optimizer_steps"] for row in metrics_of(folder) if "train/optimizer_steps" in row]
    name = "perf/update_weights_bytes"
    published = [row[name] > 0 for row in metrics_of(folder) if name in row]
    assert len(steps) == 8
    # The last iteration always publishes.
    assert [n for n, is_published in enumerate(published, start=1) if is_published] == [3, 6, 8]
    assert all(stale_T.max() <= 2 for stale_T in staleness_of(folder, interval=3) if len(stale_T))


@pytest.mark.parametrize("reset", [30, 41, 57])
def test_a_run_that_broke_off_plays_again_what_was_in_flight(tmp_path, reset):
    Struck.at, Struck.resets = reset, 0
    with pytest.raises(UserError, match="struck"):
        train("Struck", tmp_path, "x", **LATE)
    Struck.at = None
    folder = tmp_path / "x"
    state = Checkpoints(folder / "checkpoints", keep=1).newest().state
    # It struck in flight: there are groups that no batch had taken.
    assert state.pending
    assert accounted_for(folder).saved == len(state.pending)
    agentrl.train(folder, quiet=True)
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "finished"]
    found = accounted(folder)
    assert found.trained + sum(found.dropped.values()) == found.started >= 8 * 2
    ordinals = {int(e.episode.id[1:].split("-")[0]) for entries in steps_of(folder) for e in entries}
    assert set(state.pending) <= ordinals


def accounted_for(folder):
    """The audit of a run that stopped on the way."""
    found = audit(folder)
    assert found.problems == ()
    assert found.started == found.trained + sum(found.dropped.values()) + found.skipped + found.saved
    return found


def stopped_in_flight(tmp_path, world, number=signal.SIGTERM, flags=("--inline",)):
    """A run that got a signal while groups were in flight; what was saved of them, and the checkpoint."""
    # A warm start, so that episodes have several turns.
    settings = {**{k: v for k, v in LATE.items() if k not in SMALL}, **WARM, "num_rollout": 1000}
    folder, saved, later_s = tmp_path / "x", None, 0.15
    # At the few moments at which all groups have ended, or none has had a turn, it has struck too early: more
    # of them on a machine that has other work, so each next strike comes later.
    while saved is None or not (saved.in_progress if number == signal.SIGTERM else turns_of(saved)):
        step, deadline = newest(folder), time.monotonic() + 300
        process = started(tmp_path, *flags, "--resume", world=world, **settings)
        while newest(folder) < step + 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Some episodes have had a turn by then.
        time.sleep(later_s)
        later_s *= 1.5
        process.send_signal(number)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == (143 if number == signal.SIGTERM else -number), out
        checkpoint = Checkpoints(folder / "checkpoints", keep=1).newest()
        version = checkpoint.state.version
        _, saved = read_lines(checkpoint.groups, version=version, on_event=pytest.fail)
        if number == signal.SIGTERM:
            assert {*saved.ended, *saved.in_progress} >= set(checkpoint.state.pending)
    return folder, saved, checkpoint


def turns_of(saved):
    """The turns of the episodes that go on, by episode."""
    stopped = [each for group in saved.in_progress.values() for each in group.stopped if each is not None]
    return {each.id: tokens_of(each.played.trajectories) for each in stopped if each.played.trajectories}


@pytest.mark.full
def test_after_sigterm_the_groups_that_were_in_flight_go_on(tmp_path):
    folder, saved, checkpoint = stopped_in_flight(tmp_path, "Recalling")
    stopped = [each for group in saved.in_progress.values() for each in group.stopped if each is not None]
    assert all(each.played is not None for each in stopped)
    resumed_with(folder, saved, checkpoint, "terminated")
    assert not any("rollout/played_again/mean" in row for row in metrics_of(folder))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--inline",), marks=pytest.mark.full),
        pytest.param(("--num-rollout-workers=2", "--num-threads=1"), marks=pytest.mark.faults),
    ],
    ids=["one process", "players"],
)
def test_after_kill_9_the_groups_that_were_in_flight_go_on_from_their_last_turn(tmp_path, flags):
    folder, saved, checkpoint = stopped_in_flight(tmp_path, "Recalling", signal.SIGKILL, flags)
    assert turns_of(saved)
    resumed_with(folder, saved, checkpoint, None)


def resumed_with(folder, saved, checkpoint, ended):
    """The run goes on with the tokens, logprobs and versions that were saved. ended: how it ended before."""
    agentrl.train(folder, quiet=True, num_rollout=checkpoint.state.step + 4)
    *_, last, final = attempts(folder)
    assert (last.ended, final.ended) == (ended, "finished")
    accounted(folder)
    episodes = {entry.episode.id: entry.episode for entries in steps_of(folder) for entry in entries}
    played = [episode for outcome in saved.ended.values() for episode in outcome.episodes]
    played += [m.episode for g in saved.in_progress.values() for attempts_ in g.attempts for m in attempts_]
    for episode in played:
        assert tokens_of(episodes[episode.id].trajectories) == tokens_of(episode.trajectories)
    for id, before in turns_of(saved).items():
        assert tokens_of(episodes[id].trajectories)[: len(before)] == before


def tokens_of(trajectories):
    """Of each turn, the tokens, logprobs and versions."""
    return [
        (c.token_ids.tolist(), c.logprobs.tolist(), c.versions.tolist())
        for trajectory in trajectories
        for c in (turn.tokens.completion for turn in trajectory.turns)
    ]


@pytest.mark.full
def test_what_cannot_be_saved_begins_again_and_is_counted(tmp_path):
    folder, saved, checkpoint = stopped_in_flight(tmp_path, "Slow")
    assert all(
        each is None or each.played is None for group in saved.in_progress.values() for each in group.stopped
    )
    agentrl.train(folder, quiet=True, num_rollout=checkpoint.state.step + 4)
    accounted(folder)
    assert sum(row.get("rollout/played_again/mean", 0) for row in metrics_of(folder)) > 0


@pytest.mark.full
def test_a_damaged_file_of_groups_costs_only_their_episodes(tmp_path, capsys):
    folder, _, checkpoint = stopped_in_flight(tmp_path, "Recalling")
    checkpoint.groups.write_bytes(b"{}\n" + checkpoint.groups.read_bytes())
    agentrl.train(folder, num_rollout=checkpoint.state.step + 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "groups.jsonl is damaged: what was in flight is played again" in said
    accounted_for(folder)


def test_training_on_the_journal_ends_in_the_same_weights(tmp_path):
    folder = asynchronous(tmp_path)
    again = replay_of(folder, "Talkative", tmp_path, "again", LATE)
    assert weights_of(again) == weights_of(folder)
    assert learned(again) == learned(folder)


@pytest.mark.faults
def test_killed_fifty_times_every_prompt_is_accounted_for(tmp_path):
    """kill -9, or SIGTERM, at random moments of a run whose engine and trainer are processes of their own."""
    settings = {
        **{k: v for k, v in LATE.items() if k not in SMALL},
        # More than any machine comes to between two strikes, however late these are.
        **{"num_rollout": 10_000, "save_interval": 1, "eval_interval": 10_000, "world": "Talkative"},
    }
    chance, folder, codes = random.Random(0), tmp_path / "x", []
    while len(codes) < 50:
        process = started(tmp_path, "--resume", *(("--inline",) if len(codes) % 5 else ()), **settings)
        saved, deadline = newest(folder), time.monotonic() + 300
        while newest(folder) < saved + chance.randrange(1, 4):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGTERM if len(codes) % 3 == 0 else signal.SIGKILL)
        process.communicate()
        codes.append(process.returncode)
        # Whatever is saved is whole, and was in flight.
        assert accounted_for(folder).saved > 0
    assert set(codes) == {143, -signal.SIGKILL}
    process = started(tmp_path, "--resume", "--inline", **{**settings, "num_rollout": newest(folder) + 10})
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert reconcile(folder).problems == ()
    found = accounted(folder)
    assert found.started == found.trained + sum(found.dropped.values())


@pytest.mark.parametrize(
    ("settings", "is_scored"),
    [
        ({}, False),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, False),
        ({"num_steps_per_rollout": 2}, True),
        ({"ppo_epochs": 2}, True),
        ({"kl_coef": 0.01}, True),
    ],
)
def test_a_batch_of_one_step_has_no_pass_for_its_proximal_logprobs(
    tmp_path, monkeypatch, settings, is_scored
):
    scored = []
    score = RankTrainer.score

    async def noting(trainer, samples, roles=("old",), **options):
        scored.extend(role for role in roles if role != "ref")
        return await score(trainer, samples, roles, **options)

    monkeypatch.setattr(RankTrainer, "score", noting)
    folder = asynchronous(tmp_path, num_rollout=4, **settings)
    steps = sum(row.get("train/optimizer_steps", 0) for row in metrics_of(folder))
    assert steps > 0
    assert scored == (["old"] * len(scored) if is_scored else [])
    assert bool(scored) == is_scored
    rows = [row for row in metrics_of(folder) if "train/tis" in row]
    assert rows
    assert all({"train/train_rollout_ess", "train/staleness_0/share"} & row.keys() for row in rows)
    # Engine and trainer agree in fp32, but for the updates between them.
    assert all(0.5 < row["train/tis"] < 2.0 for row in rows)
    accounted(folder)
