"""The benchmark of suites kills a process at half, and what goes on has the table of the whole."""

from __future__ import annotations

import pytest

from benchmarks.suite import SuiteSettings, bench_suite


@pytest.mark.full
def test_a_small_suite_that_was_killed_has_the_table_of_the_whole() -> None:
    envs = ("Calculator-v0", "HopSearch-v0", "Taxi-v0", "FrozenLake-v0")
    summary = bench_suite(SuiteSettings(envs, n=16))["summary"]
    assert summary["tables are equal"]
    assert summary["episodes"] == 64
    assert summary["resumed/whole"] > 0
