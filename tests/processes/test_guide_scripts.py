"""The commands and scripts of the guide "Run on Ray" work as they are written."""

from __future__ import annotations

import pytest

from tests.processes.machines import FAR, NEAR
from tests.processes.test_two_machines import run

OWN_PROCESSES = ("--pid", "--mount-proc")


@pytest.mark.full
def test_a_run_is_a_job_of_the_cluster(tmp_path):
    """With Ray's real job server and dashboard."""
    result = run("job", tmp_path, "guide_scripts", OWN_PROCESSES)
    assert result["code"] == 0, result["out"]
    assert "Job 'raysubmit_" in str(result["out"])
    assert result["attempts"] == [["finished", None]]
    assert result["problems"] == []
    assert result["dashboard"] == "http://127.0.0.1:8265"
    assert "agentrl x rank 0" in result["actors"]
    assert result["addresses"] == [NEAR, None, None]
    # Ray's dashboard is for this machine alone, as the guide says.
    assert [address for address in result["listening"] if address.endswith(":8265")] == ["127.0.0.1:8265"]


@pytest.mark.full
def test_a_job_of_slurm_stops_before_its_end_and_the_next_one_goes_on(tmp_path):
    """Each job starts a cluster of two machines, which asks for a token, and has one rank on each."""
    result = run("slurm", tmp_path, "guide_scripts", OWN_PROCESSES)
    assert result["code"] == 0, result["out"]
    (terminated, resumed_none), (finished, resumed_from) = result["attempts"]
    assert (terminated, resumed_none, finished) == ("terminated", None, "finished")
    # The first job wrote a checkpoint of all that it had trained when it got the signal.
    assert resumed_from == result["trained before"] >= 2
    assert result["trained"] == 40
    assert result["problems"] == []
    where = result["where"]
    assert {where[f"rank {number}"].rpartition(" ")[2] for number in (0, 1)} == {NEAR, FAR}
