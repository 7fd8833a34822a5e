"""What an object in another process does, in a child and on a real Ray: the same suite for both."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from agentrl.errors import RemoteError, RequestTooLargeError
from agentrl.processes.children import Children
from agentrl.processes.hosted import tell
from agentrl.processes.ray.actors import Actors
from agentrl.processes.remote import call_all, completed

PATIENCE_S = 60.0
GONE = r"was ended by SIGKILL|ended with code 3|was killed"


class Counter:
    """The object."""

    def __init__(self, start, *, slow_s=0.0):
        time.sleep(slow_s)
        self.total = start

    def add(self, number):
        self.total += number
        return self.total

    def add_all(self, *, numbers):
        return self.add(int(numbers.sum()))

    def now(self):
        return self.total

    def pid(self):
        return os.getpid()

    def wait_for(self, path):
        Path(path).with_suffix(".begun").touch()
        while not Path(path).exists():
            time.sleep(0.01)
        return self.total

    def report(self, *messages):
        for message in messages:
            tell(message)

    def fail(self, text):
        print("the last words")
        raise ArithmeticError(text)

    def leave(self):
        os._exit(3)

    def refuse(self):
        raise RequestTooLargeError("too many tokens")

    def foreign(self):
        sys.modules["nowhere"] = ModuleType("nowhere")
        sys.modules["nowhere"].Absent = type("Absent", (), {"__module__": "nowhere"})
        return sys.modules["nowhere"].Absent()

    def unsendable(self):
        return threading.Lock()


class StrangeError(Exception):
    """An exception that needs what no other process gives it."""

    def __init__(self, first, second):
        super().__init__(first, second)


class Breaks:
    """An object that cannot be made."""

    def __init__(self):
        raise StrangeError("no", "object")


@pytest.fixture(params=["child", "ray"])
def places(request):
    if request.param == "child":
        return Children()
    placement = request.getfixturevalue("placement")
    return Actors(request.getfixturevalue("session"), placement.group, placement.ranks)


@pytest.fixture
def start(places, tmp_path):
    """Starts objects, which end with the test."""
    started = []

    def begin(kind, *args, told=lambda _: None, **kwargs):
        log = tmp_path / f"object-{len(started)}.log"
        remote, created = places.start(0, log, told, kind, *args, **kwargs)
        started.append(remote)
        return remote, created

    yield begin
    for remote in started:
        remote.close()


def until(happened):
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_object_lives_in_a_process_of_its_own_and_keeps_what_it_has(start):
    remote, created = start(Counter, 3)
    assert created.result() is None
    calls = [remote.call(Counter.add, number) for number in (1, 10, 100)]
    assert [call.result() for call in calls] == [4, 14, 114]
    pid = remote.call(Counter.pid).result()
    assert pid == remote.pid != os.getpid()
    assert f"process {pid}" in remote.where
    assert f"process {pid}" in remote.process
    assert remote.is_here


def test_calls_wait_for_a_slow_start(start):
    remote, created = start(Counter, 1, slow_s=1.0)
    added = remote.call(Counter.add, 1)
    assert not added.is_done
    assert not created.is_done
    assert added.result() == 2
    assert created.is_done


def test_arguments_of_many_objects_are_written_once_and_arrive_whole(start):
    remotes = [start(Counter, 0)[0] for _ in range(1)]
    numbers = np.ones(3_000_000, np.int32)
    calls = call_all(remotes, Counter.add_all, numbers=numbers)
    assert [call.result() for call in calls] == [3_000_000]


async def test_a_reply_leaves_the_event_loop_alone(start, tmp_path):
    remote, _ = start(Counter, 7)
    waiting = asyncio.create_task(remote.call(Counter.wait_for, str(tmp_path / "go")).reply())
    ticks = 0
    while not (tmp_path / "go.begun").exists():
        await asyncio.sleep(0.01)
        ticks += 1
    (tmp_path / "go").touch()
    assert await waiting == 7
    assert ticks


async def test_a_reply_that_nobody_waits_for_leaves_the_next_calls_alone(start, tmp_path):
    remote, _ = start(Counter, 7)
    waiting = asyncio.create_task(remote.call(Counter.wait_for, str(tmp_path / "go")).reply())
    while not (tmp_path / "go.begun").exists():
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (tmp_path / "go").touch()
    assert await remote.call(Counter.add, 1).reply() == 8


def test_a_call_beside_overtakes_the_one_that_runs(start, tmp_path):
    remote, _ = start(Counter, 7)
    waiting = remote.call(Counter.wait_for, str(tmp_path / "go"))
    until((tmp_path / "go.begun").exists)
    assert remote.call_beside(Counter.now).result() == 7
    assert completed([waiting], 0) == []
    (tmp_path / "go").touch()
    assert completed([waiting]) == [waiting]


def test_what_an_object_tells_arrives_in_order_and_in_the_middle_of_a_call(start, tmp_path):
    told = []
    remote, _ = start(Counter, 0, told=told.append)
    remote.call(Counter.report, "one", {"two": 2})
    waiting = remote.call(Counter.wait_for, str(tmp_path / "go"))
    until((tmp_path / "go.begun").exists)
    remote.call_beside(Counter.report, "three")
    until(lambda: len(told) == 3)
    assert told == ["one", {"two": 2}, "three"]
    assert not waiting.is_done
    (tmp_path / "go").touch()
    waiting.result()


def test_an_exception_names_itself_and_the_object_goes_on(start):
    remote, _ = start(Counter, 0)
    before_s = time.time()
    with pytest.raises(RemoteError, match=r"^ArithmeticError: no luck$") as caught:
        remote.call(Counter.fail, "no luck\nand more").result()
    assert not caught.value.is_gone
    assert before_s <= caught.value.at_s <= time.time()
    assert remote.call(Counter.add, 1).result() == 1
    text = remote.log.read_text()
    assert "the last words" in text
    assert "Traceback" in text
    assert remote.last_lines()[-1] == "and more"


def test_an_object_that_cannot_be_made_says_why(start):
    remote, created = start(Breaks)
    with pytest.raises(RemoteError, match=r"StrangeError: \('no', 'object'\)"):
        created.result()
    assert "Traceback" in remote.log.read_text()


def test_a_class_that_no_process_can_import_is_named(start):
    absent = type("Absent", (), {"__module__": "nowhere"})
    _, created = start(absent)
    with pytest.raises(RemoteError, match="ModuleNotFoundError: No module named 'nowhere'"):
        created.result()


def test_a_reply_that_cannot_be_sent_is_an_error_of_its_call(start):
    remote, _ = start(Counter, 0)
    with pytest.raises(RemoteError, match=r"pickle|serialize"):
        remote.call(Counter.unsendable).result()
    assert remote.call(Counter.add, 1).result() == 1


def test_an_error_of_the_package_is_raised_as_what_it_is(start):
    remote, _ = start(Counter, 0)
    with pytest.raises(RequestTooLargeError, match=r"^too many tokens$"):
        remote.call(Counter.refuse).result()
    assert "Traceback" in remote.log.read_text()


async def test_an_error_that_was_raised_is_not_logged_as_one_that_nobody_read(start, caplog):
    remote, _ = start(Counter, 0)
    with pytest.raises(RemoteError, match="no luck"):
        await remote.call(Counter.fail, "no luck").reply()
    gc.collect()
    assert not caplog.records


def test_a_reply_of_a_class_that_this_process_lacks_is_an_error_of_its_call(start):
    remote, _ = start(Counter, 0)
    with pytest.raises(RemoteError, match=r"cannot be read .*nowhere"):
        remote.call(Counter.foreign).result()
    assert remote.call(Counter.add, 1).result() == 1


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_process_that_goes_fails_its_calls_and_all_later_ones(start, tmp_path, how):
    remote, _ = start(Counter, 0)
    pid = remote.pid
    waiting = remote.call(Counter.wait_for, str(tmp_path / "never"))
    until((tmp_path / "never.begun").exists)
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        remote.call_beside(Counter.leave)
    # A call beside it may be answered before it has left.
    until(lambda: not is_running(pid))
    for call in (waiting, remote.call(Counter.add, 1), remote.call_beside(Counter.now)):
        with pytest.raises(RemoteError, match=GONE) as caught:
            call.result()
        assert caught.value.is_gone


def test_one_that_stands_still_is_ended_at_once(start, tmp_path):
    remote, _ = start(Counter, 0)
    pid = remote.pid
    waiting = remote.call(Counter.wait_for, str(tmp_path / "never"))
    until((tmp_path / "never.begun").exists)
    os.kill(pid, signal.SIGSTOP)
    # Much more than a pipe takes: whoever calls does not wait for the process.
    big = np.zeros(1_000_000, np.int64)
    late = [remote.call(Counter.add_all, numbers=big) for _ in range(3)]
    remote.end()
    for call in (waiting, *late):
        with pytest.raises(RemoteError) as caught:
            call.result()
        assert caught.value.is_gone
    remote.close()
    until(lambda: not is_running(pid))


def test_its_stacks_are_in_its_log_while_a_call_runs(start, tmp_path):
    remote, _ = start(Counter, 0)
    assert remote.pid
    waiting = remote.call(Counter.wait_for, str(tmp_path / "go"))
    until((tmp_path / "go.begun").exists)
    remote.print_stacks()
    until(lambda: "in wait_for" in remote.log.read_text())
    (tmp_path / "go").touch()
    assert waiting.result() == 0


def test_a_log_that_was_cut_has_what_follows(start):
    remote, created = start(Counter, 0)
    created.result()
    with pytest.raises(RemoteError):
        remote.call(Counter.fail, "before").result()
    os.truncate(remote.log, 0)
    with pytest.raises(RemoteError):
        remote.call(Counter.fail, "after").result()
    text = remote.log.read_text()
    assert "after" in text
    assert not re.search("before", text)


def test_a_closed_one_is_gone_and_its_log_stays(start):
    remote, created = start(Counter, 0)
    created.result()
    pid = remote.pid
    remote.close()
    until(lambda: not is_running(pid))
    assert remote.log.exists()
    with pytest.raises(RemoteError) as caught:
        remote.call(Counter.now).result()
    assert caught.value.is_gone
