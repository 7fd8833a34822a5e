"""SIGKILL of each process of a run, at fifty moments: it resumes, its accounts hold, and nothing is left.

The moments are those of one run, whose next attempt resumes what the strike left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.errors import ConfigError
from agentrl.records.history import attempts
from agentrl.records.status import read_status
from agentrl.rollout.saved import read_lines
from agentrl.run.checkpoints import Checkpoints
from tests.flow.runs import WARM
from tests.flow.test_asynchronous import LATE, accounted_for
from tests.flow.test_resume import SMALL, accounted, newest, started
from tests.trainer.megatron.launching import alive, descendants, words_of

PHASES = {
    "starting": ("driver", "engine", "rank", "player"),
    "playing": ("driver", "engine", "player", "sandbox"),
    "training": ("driver", "engine", "rank", "player"),
    "saving": ("driver", "engine", "rank", "player"),
}
"""What is killed while the run is in a phase."""
MARKS = {
    "engine": b"agentrl.engine.embedded",
    "rank": b"rank-",
    "player": b"agentrl.run.player",
    "sandbox": b"from inside import enter",
}
SETTINGS = {
    **{name: value for name, value in LATE.items() if name not in SMALL},
    **WARM,
    **{"num_rollout": 100_000, "save_interval": 1, "eval_interval": 100_000, "eval_episodes": 1},
    # Steps whose groups all agree end no run here; and hundreds of larger steps would unlearn the tool.
    **{"max_idle_rollouts": 0, "lr": 1e-6},
    **{"env": "tests.flow.workshop:Workshop", "num_rollout_workers": 1, "num_threads": 1},
}
LIMIT_S, PATIENCE_S = 600.0, 3.0
"""How long to wait for a moment, and for the next call of a process that is stopped (seconds)."""


class Moment(NamedTuple):
    """When a process is killed. late_s: after the phase was seen (seconds)."""

    number: int
    phase: str
    target: str
    late_s: float

    @property
    def is_inline(self) -> bool:
        """Whether the run is in one process, which has the target: that takes a third of the time."""
        is_inside = self.target == "sandbox" or (self.target == "driver" and self.number % 2 == 1)
        return is_inside and self.phase != "training"


def plan(number: int) -> list[Moment]:
    """Moments that a seed draws, each phase and each target of it about equally often."""
    chance = random.Random(43)
    pairs = [(phase, target) for phase, targets in PHASES.items() for target in targets]
    drawn = [pair for _ in range(number // len(pairs) + 1) for pair in chance.sample(pairs, len(pairs))]
    return [Moment(n, *pair, chance.random() * 0.5) for n, pair in enumerate(drawn[:number])]


MOMENTS = plan(50)


class Place(NamedTuple):
    """Where the run is. temporary: its folder for temporary files."""

    folder: Path
    temporary: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    (folder / "tmp").mkdir()
    return Place(folder, folder / "tmp")


@pytest.fixture(scope="module")
def kept():
    """How many turns each strike left for the next attempt."""
    return []


def wait_for(condition: Callable[[], object], process, what: str) -> None:
    """Wait while the run goes on; a fault test that has waited in vain has not struck."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def status_of(folder, process):
    """What the run says of itself; None = nothing yet."""
    with suppress(ConfigError):
        status = read_status(folder)
        return status if status.pid == process.pid else None
    return None


def target_of(name: str, driver: int) -> int | None:
    """The process of that name; of the sandbox one that runs a program now."""
    if name == "driver":
        return driver
    found = [pid for pid in descendants(driver) if MARKS[name] in b" ".join(words_of(pid))]
    if name == "sandbox":
        found = [pid for pid in found if not descendants(pid)]
    return found[-1] if found else None


def in_phase(moment: Moment, folder: Path, process) -> Callable[[], bool]:
    """Whether the run is in the phase."""

    def is_playing():
        status = status_of(folder, process)
        return status is not None and status.places is not None and status.places.in_flight > 0

    def is_saving():
        return any((folder / "checkpoints").glob(".step_*.coming"))

    def is_starting():
        return target_of(moment.target, process.pid) is not None and len(attempts(folder)) > 0

    return {"starting": is_starting, "saving": is_saving}.get(moment.phase, is_playing)


def is_struck_in_flight(moment: Moment, folder: Path, process) -> bool:
    """Whether the target, which stands still, is in the middle of its work; by the status of the run."""
    status = status_of(folder, process)
    if status is None:
        return False
    if moment.phase == "training":
        return any(work.name in ("score", "train") for work in status.working)
    if moment.target == "engine":
        return status.requests > 0
    if moment.target == "player":
        return status.processes["player 0"].groups > 0
    return status.episodes.get("tool", 0) > 0


def hold_in_flight(held: int, moment: Moment, folder: Path, process) -> None:
    """Stop a process in the middle of its work; where the run waits for other work of it, that is first."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        os.kill(held, signal.SIGSTOP)
        stopped = time.monotonic()
        while time.monotonic() < stopped + PATIENCE_S:
            assert process.poll() is None, process.communicate()
            if is_struck_in_flight(moment, folder, process):
                return
            time.sleep(0.002)
        os.kill(held, signal.SIGCONT)
        time.sleep(0.05)
    pytest.fail("it was not in flight")


def strike(moment: Moment, folder: Path, process) -> None:
    """Kill the target, in flight."""
    wait_for(lambda: target_of(moment.target, process.pid), process, "there is no such process")
    target, held = target_of(moment.target, process.pid), None
    if moment.phase == "training":
        # The trainer's next call does not return before the strike.
        held = target_of("rank", process.pid)
    elif moment.phase == "playing" and moment.target != "driver":
        held = target
    if held is not None:
        hold_in_flight(held, moment, folder, process)
    os.kill(target, signal.SIGKILL)
    if held not in (None, target):
        os.kill(held, signal.SIGCONT)


def ended(moment: Moment, folder: Path, process) -> str:
    """The output of the run, which the strike has ended; one that goes on is ended when it has gone on."""
    if moment.target in ("player", "sandbox"):
        before = newest(folder)
        # The first may have been as good as written at the strike.
        wait_for(lambda: newest(folder) > before + 1, process, "the run did not go on")
        process.kill()
    out, _ = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in out
    if moment.target in ("engine", "rank"):
        assert process.returncode > 0, out
        assert "SIGKILL" in out
    else:
        assert process.returncode == -signal.SIGKILL, out
    if moment.target == "player":
        assert "was ended by SIGKILL" in " ".join(out.split()), out
    return out


def check_nothing_is_left(pids: set[int], shared: set[str], temporary: Path) -> None:
    """No process, no shared memory, no file or socket in the folder for temporary files."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [(pid, words_of(pid)) for pid in pids if alive(pid)]
        time.sleep(0.02)
    assert {name for name in os.listdir("/dev/shm") if "agentrl" in name} <= shared
    assert sorted(path.name for path in temporary.iterdir()) == []


@pytest.mark.faults
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: f"{m.number}-{m.target}-{m.phase}")
def test_kill_plan(place, kept, monkeypatch, moment):
    monkeypatch.setenv("TMPDIR", str(place.temporary))
    folder, before = place.folder / "x", newest(place.folder / "x")
    number, shared = len(attempts(folder)), set(os.listdir("/dev/shm"))
    # Where the run's own process plays, a number of players is refused.
    inline, only_without = (["--inline"], {"num_rollout_workers"}) if moment.is_inline else ([], set())
    settings = {name: value for name, value in SETTINGS.items() if name not in only_without}
    process = started(place.folder, "--resume", *inline, **settings)
    wait_for(lambda: len(attempts(folder)) > number, process, "it did not begin")
    # What the strike before has left is where it goes on.
    assert attempts(folder)[-1].resumed_from == (before or None)
    if moment.phase != "starting" or not before:
        wait_for(lambda: newest(folder) > before, process, "it did not go on")
    wait_for(in_phase(moment, folder, process), process, f"it was never {moment.phase}")
    time.sleep(0.0 if moment.phase == "saving" else moment.late_s)
    pids = {process.pid, *descendants(process.pid)}
    strike(moment, folder, process)
    pids |= {*descendants(process.pid)}
    ended(moment, folder, process)
    found = accounted_for(folder)
    check_nothing_is_left(pids, shared, place.temporary)
    if moment.phase == "playing":
        assert found.saved > 0
    if newest(folder):
        checkpoint = Checkpoints(folder / "checkpoints", keep=1).newest()
        lines, _ = read_lines(checkpoint.groups, version=checkpoint.state.version, on_event=pytest.fail)
        kept.append(len(lines))


@pytest.mark.faults
def test_kill_plan_ends_as_a_run_does(place, kept):
    assert sum(kept) > 0, "no strike found an episode in flight that had had a turn"
    folder = place.folder / "x"
    process = started(place.folder, "--resume", **{**SETTINGS, "num_rollout": newest(place.folder / "x") + 3})
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert attempts(folder)[-1].ended == "finished"
    found = accounted(folder)
    assert found.started == found.trained + sum(found.dropped.values())
