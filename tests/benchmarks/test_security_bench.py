"""The benchmark of security, small: it measures what it says."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from benchmarks import floods
from benchmarks.security import INLINE, TEMPLATE, Security, Subject, bench_security


@pytest.mark.full
def test_a_format_of_each_kind_is_measured():
    formats = (INLINE, TEMPLATE, "qwen3")
    result = bench_security(Security(formats, sizes=(200,), turns=2, rounds=2, repeats=2), with_python=False)
    assert json.loads(json.dumps(result)) == result
    assert result["holds_ms"].keys() == result["ordinary"].keys() == set(formats)
    assert result["summary"]["longest_hold_ms"] == max(h["hold_ms"] for h in result["holds_ms"].values())
    assert result["floods_ms"].keys() > floods.TEXTS.keys()
    assert result["summary"]["longest_flood_ms"] == max(result["floods_ms"].values())
    assert all(price["ratio"] > 0 for price in result["ordinary"].values())


def test_a_text_that_holds_the_loop_is_measured(monkeypatch):
    async def parse(self, ids):
        time.sleep(0.1 if len(ids) > 150 else 0.0)

    monkeypatch.setattr(Subject, "parse", parse)
    settings = Security((INLINE,), sizes=(100, 200), turns=1, rounds=1, repeats=1, floods=False)
    result = bench_security(settings, with_python=False)
    assert result["summary"]["longest_hold_ms"] >= 85


@pytest.mark.full
def test_every_family_has_its_markers_and_parses_the_call_that_it_writes():
    for name in Security().formats:
        subject = Subject.of(name)
        message = asyncio.run(subject.parse(subject.ids(subject.form)))
        assert [call.error for call in message.tool_calls] == [None] * bool(subject.form), name
