"""Machines that are going away: what is on them goes on elsewhere, and the run says so in one line."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest

from agentrl.errors import RemoteError
from agentrl.processes.ray.draining import Draining, in_words
from agentrl.run.leaving import MachineLeavingError, stopped_in_time
from agentrl.run.resuming import RunStart, with_restarts
from tests.processes.test_two_machines import run


def cluster_of(draining):
    """A cluster whose run is on `own` and has a rank on `far`."""
    needed = {"far": "10.0.0.8, the machine of rank 0,", "own": "10.0.0.7, the machine of the run,"}
    return SimpleNamespace(session=SimpleNamespace(draining=draining, node="own"), needed=needed)


@pytest.mark.parametrize(("node", "may_move"), [("far", True), ("own", False)])
async def test_a_run_stops_where_a_machine_that_it_needs_is_going_away(node, may_move):
    draining, lines, ended = Draining(), [], []

    async def work():
        try:
            async with stopped_in_time(cluster_of(draining), lines.append):
                try:
                    await asyncio.sleep(3600)
                finally:
                    # As a run that finishes its step.
                    await asyncio.sleep(0.1)
                    ended.append(True)
        except MachineLeavingError as error:
            return error

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    draining._deadlines = {"other": 0.0, node: float("inf")}
    error = await asyncio.wait_for(working, 10)
    assert error.may_move is may_move
    assert ended == [True]
    (line,) = lines
    assert line.endswith(" is going away: the run stops before that.")


async def test_a_signal_is_no_departure():
    draining = Draining()

    async def work():
        async with stopped_in_time(cluster_of(draining), print):
            await asyncio.sleep(3600)

    working = asyncio.create_task(work())
    await asyncio.sleep(0.1)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


def test_the_time_that_is_left_is_in_words():
    draining = Draining()
    draining._deadlines = {"past": 1.0, "unknown": float("inf")}
    assert [draining.left_s(node) for node in ("past", "unknown", "stays")] == [0.0, float("inf"), None]
    assert [in_words(left_s) for left_s in (float("inf"), 58.4)] == ["", " in 58 s"]


def attempts_of(limit, *errors):
    """How often a run was tried whose attempts end with these errors, and what it printed."""
    checkpoint = SimpleNamespace(max_restarts=limit)
    lines, begun = [], []
    start = RunStart(SimpleNamespace(checkpoint=checkpoint, command="train"), FOLDER, False, {})
    endings = iter(errors)

    def attempt(start):
        begun.append(start.resumes)
        error = next(endings, None)
        if error is not None:
            raise error

    try:
        with_restarts(start, SimpleNamespace(line=lines.append), attempt)
    except RemoteError as error:
        lines.append(error)
    return begun, lines


FOLDER = SimpleNamespace(path="runs/x", report=SimpleNamespace(exists=lambda: False))
LEAVES, STAYS = (MachineLeavingError("It is going away.", may_move=may_move) for may_move in (True, False))
LOST = RemoteError("it was lost")


def test_an_attempt_that_a_departure_ends_is_no_failure():
    begun, lines = attempts_of(1, LEAVES, LOST, LEAVES)
    assert begun == [False, True, True, True]
    assert lines == [
        "It is going away. The run resumes by itself on the machines that are left.",
        "it was lost. The run resumes by itself (1 of 1).",
        "It is going away. The run resumes by itself on the machines that are left.",
    ]
    assert attempts_of(1, LOST, LEAVES, LOST)[1][-1] is LOST


@pytest.mark.parametrize(("limit", "error"), [(0, LEAVES), (1, STAYS)])
def test_a_run_without_restarts_or_whose_own_machine_is_going_away_says_how_to_resume(limit, error):
    begun, lines = attempts_of(limit, error)
    assert begun == [False]
    assert lines == ["Stopped. Resume it with `agentrl train runs/x --resume`.", error]


@pytest.mark.faults
@pytest.mark.parametrize("scenario", ["players", "terminated", "notice"])
def test_groups_in_play_go_on_at_another_machine_token_for_token(tmp_path, scenario):
    """Whether `ray drain-node` says so, `ray start --block` gets SIGTERM, or the guide's handler a notice."""
    result = run(scenario, tmp_path, "draining_scenarios")
    (line,) = result.pop("lines")
    who, what = (
        r"player 1 \(process \d+ on 10\.231\.0\.2\)",
        "groups g1, g3 go on elsewhere from where they are",
    )
    assert re.fullmatch(rf"{who}: its machine is going away in \d+ s; {what}\.", line)
    assert result == {
        "same": True,
        "each_call_once": True,
        "moved": ["101", "103"],
        "machines": 2,
        "late": ["g9", "g10"],
        "far_was_empty": True,
    }


@pytest.mark.faults
def test_a_run_whose_rank_is_on_a_machine_that_is_going_away_goes_on_at_others(tmp_path):
    result = run("whole_run", tmp_path, "draining_scenarios")
    out = str(result["out"])
    assert result["code"] == 0, out
    (first, last) = result["attempts"]
    assert first == ["interrupted", None]
    # There is no checkpoint but the one that the departure made.
    assert last[0] == "finished"
    assert int(last[1]) >= int(result["num_before"]) >= 2
    assert re.search(r"10\.231\.0\.2, the machine of rank 0, is going away in \d\d s: the run stops", out)
    assert "The run resumes by itself on the machines that are left." in out
    assert "(1 of 1)" not in out
    for name in ("rank 0", "player 0"):
        assert result["before"][name].endswith(" on 10.231.0.2")
        assert result["after"][name].endswith(" on 10.231.0.1")
    assert result["problems"] == []


@pytest.mark.faults
@pytest.mark.full
def test_requests_of_a_server_go_on_at_others_and_it_comes_back_on_another_machine(tmp_path):
    result = run("servers", tmp_path, "draining_scenarios")
    leaving, back = result["events"]
    what = r"its machine is going away in \d\d s, and its requests go on elsewhere; it is restarted\."
    assert re.fullmatch(rf"server-1: {what}", leaving)
    assert re.fullmatch(r"server-1 is back after [\d.]+ s\.", back)
    hosts = [url.partition("//")[2].partition(":")[0] for url in result["urls"]]
    assert hosts == ["10.231.0.2", "10.231.0.1"]
    # It gets the weights that it missed before it gets requests.
    assert result["versions"] == [[1], [2]]
    assert result["version_there"] == 2
    assert result["counts"]["resumed"] >= 1
    assert result["counts"].get("lost", 0) == 0
