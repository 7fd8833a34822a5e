"""Waits between attempts: they double, stay below a bound, and heed a server that asks for more or less."""

from __future__ import annotations

import pytest

from agentrl.retrying import Backoff


@pytest.fixture
def slept(monkeypatch):
    found: list[float] = []

    async def sleep(seconds):
        found.append(seconds)

    monkeypatch.setattr("agentrl.retrying.asyncio.sleep", sleep)
    return found


async def test_waits_double_up_to_a_bound_and_each_is_in_its_upper_half(slept):
    backoff = Backoff(attempts=9, first_wait_s=0.5, max_wait_s=3.0)
    for failures in range(1, 9):
        await backoff.wait(failures)
    longest = [0.5, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert all(most / 2 <= wait <= most for wait, most in zip(slept, longest, strict=True))
    assert len(set(slept)) == len(slept), "drawn by chance"


async def test_a_server_that_asks_for_a_wait_gets_it_up_to_the_bound(slept):
    backoff = Backoff(attempts=3, first_wait_s=0.5, max_wait_s=3.0)
    for retry_after_s in (0.0, 2.5, 60.0):
        await backoff.wait(1, retry_after_s)
    assert slept == [0.0, 2.5, 3.0]


def test_the_last_attempt_is_the_one_that_uses_them_up():
    backoff = Backoff(attempts=3, first_wait_s=0.5, max_wait_s=3.0)
    assert [backoff.is_last(failures) for failures in range(1, 5)] == [False, False, True, True]
