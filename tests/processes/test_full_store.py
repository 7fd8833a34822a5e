"""Runs on a Ray whose object store is full: in namespaces of their own, where its disk is small."""

from __future__ import annotations

import pytest

from tests.processes.test_two_machines import run

PROGRAM = "on_a_full_store"


@pytest.mark.faults
def test_a_run_goes_on_where_ray_moves_what_fills_its_store_to_its_disk(tmp_path):
    result = run("spilled", tmp_path, PROGRAM)
    assert result["spilled"] > 0
    assert result["trained"] == 4 * 4


@pytest.mark.faults
def test_a_store_and_a_disk_that_are_full_end_the_run_with_a_sentence_and_it_resumes(tmp_path):
    result = run("full", tmp_path, PROGRAM)
    message = str(result["message"])
    assert "Ray's object store on " in message
    assert (
        " is full, and so is the disk that it spills to; make room in Ray's --temp-dir, or start" in message
    )
    assert result["attempts"] == ["failed", "finished"]
    assert result["trained"] > 0
