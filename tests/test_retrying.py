"""Waits between attempts: they double, stay below a bound, and follow Retry-After."""

from __future__ import annotations

import pytest

from agentrl.retrying import Backoff


@pytest.fixture
def slept(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("agentrl.retrying.asyncio.sleep", sleep)
    return waits


async def test_waits_double_up_to_a_bound_and_each_is_in_its_upper_half(slept):
    backoff = Backoff(attempts=9, first_wait_s=0.5, max_wait_s=3.0)
    for failures in range(1, 9):
        await backoff.wait(failures)
    longest = [0.5, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(slept, longest, strict=True))
    assert len(set(slept)) == len(slept), "random waits"


async def test_retry_after_is_respected_up_to_the_bound(slept):
    backoff = Backoff(attempts=3, first_wait_s=0.5, max_wait_s=3.0)
    for retry_after_s in (0.0, 2.5, 60.0):
        await backoff.wait(1, retry_after_s)
    assert slept == [0.0, 2.5, 3.0]


def test_the_last_attempt_is_the_one_that_reaches_the_limit():
    backoff = Backoff(attempts=3, first_wait_s=0.5, max_wait_s=3.0)
    assert [backoff.is_last(failures) for failures in range(1, 5)] == [False, False, True, True]
