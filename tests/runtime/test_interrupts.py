"""SIGTERM and SIGHUP end work as Ctrl-C does: in order, with their own code; a second signal breaks off."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from agentrl.errors import UserError
from agentrl.runtime.interrupts import exits_on_signals, run_until_signal
from agentrl.runtime.stage import EnvCode, stage
from agentrl.tools.names import _Importing

ENDLESS_S = 60.0


class Unprintable:
    """As good as unprintable: a run's result may hold every token of it."""

    def __repr__(self) -> str:
        raise AssertionError("it is printed")


class Work:
    """Sends itself the signals in mid-work, and needs some time to end in order."""

    def __init__(self, *signals, cleanup_s=0.0):
        self.signals, self.cleanup_s = list(signals), cleanup_s
        self.log = []

    async def run(self):
        self.log.append("begun")
        try:
            self._strike()
            await asyncio.sleep(ENDLESS_S)
            self.log.append("ended")
        finally:
            self._strike()
            await asyncio.sleep(self.cleanup_s)
            self.log.append("closed")

    def _strike(self):
        if self.signals:
            os.kill(os.getpid(), self.signals.pop(0))


def ended_by(work):
    """The exception that the work ends with, within a second."""
    started = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        run_until_signal(work.run())
    assert time.monotonic() - started < 1.0
    return caught.value


def test_the_result_of_a_run_is_not_made_a_text() -> None:
    result = Unprintable()

    async def main() -> Unprintable:
        return result

    assert run_until_signal(main()) is result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_mid_work_cancels_it_and_it_ends_in_order(number):
    work = Work(number, cleanup_s=0.05)
    before = signal.getsignal(number)
    error = ended_by(work)
    assert work.log == ["begun", "closed"]
    assert isinstance(error, KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    if number != signal.SIGINT:
        assert error.code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_breaks_the_cleanup_off(number):
    work = Work(number, number, cleanup_s=ENDLESS_S)
    assert isinstance(ended_by(work), KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    assert work.log == ["begun"]


def test_sigterm_wakes_a_loop_that_waits_for_nothing_else():
    sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    sender.start()
    work = Work()
    assert isinstance(ended_by(work), SystemExit)
    assert work.log == ["begun", "closed"]


def test_sigterm_counts_where_ctrl_c_is_ignored():
    """As in a process that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert isinstance(ended_by(Work(signal.SIGTERM)), SystemExit)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_terminal_that_closes_sends_sighup_twice_and_the_cleanup_goes_on():
    work = Work(signal.SIGHUP, signal.SIGHUP, cleanup_s=0.05)
    assert ended_by(work).code == 129
    assert work.log == ["begun", "closed"]


def test_sighup_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main():
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        return 7

    try:
        assert run_until_signal(main()) == 7
        with exits_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_outside_of_a_loop_a_signal_raises_at_once_and_only_in_the_block(number):
    before = signal.getsignal(number)
    lines = []

    def strike():
        os.kill(os.getpid(), number)
        lines.append("it goes on")

    with pytest.raises(SystemExit) as caught, exits_on_signals():
        strike()
    assert (caught.value.code, lines) == (128 + number, [])
    assert signal.getsignal(number) == before


def in_code_of_an_environment():
    with EnvCode("Maze-v0", "tasks"):
        os.kill(os.getpid(), signal.SIGTERM)


def in_a_step():
    async def step():
        async with stage("step", 5.0):
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(step())


def in_a_module_of_a_user():
    with _Importing(lambda error: UserError(f"it is broken: {error}")):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("place", [in_code_of_an_environment, in_a_step, in_a_module_of_a_user])
def test_a_signal_in_code_of_users_ends_the_program_and_is_no_exit_of_theirs(place):
    with pytest.raises(SystemExit) as caught, exits_on_signals():
        place()
    assert caught.value.code == 128 + signal.SIGTERM


def test_in_another_thread_it_runs_without_signals():
    async def main():
        return 7

    results = []
    thread = threading.Thread(target=lambda: results.append(run_until_signal(main())))
    thread.start()
    thread.join()
    assert results == [7]
