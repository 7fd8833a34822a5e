"""A run is found in the lists of a Ray cluster that it is attached to, and names its dashboard."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.records.status import read_status

ROOT = Path(__file__).parents[2]
RUN = """
import json, os, sys
from pathlib import Path

import agentrl
from agentrl.processes.ray.head import own_head
from tests.flow.runs import train
from tests.processes.test_train_on_ray import SETTINGS

folder, port = Path(sys.argv[1]), int(sys.argv[2])
with own_head(folder / "ray") as head:
    os.environ |= head.variables
    settings = {**SETTINGS, "num_rollout": 1, "num_rollout_workers": 1, "num_cpus_per_rollout_worker": 0.25}
    settings |= {"use_prometheus": True, "prometheus_port": port, "quiet": False}
    settings |= {"cluster": "ray", "ray_address": head.address, "num_cpus_per_rank": 0.5}
    train("Bandit", folder, "found", **settings)
    import ray
    ray.init(head.address, log_to_driver=False, namespace="reader")
    actors = ray._private.state.actors().values()
    jobs = ray._private.worker.global_worker.gcs_client.get_all_job_info().values()
    groups = ray.util.placement_group_table().values()
    print(json.dumps({
        "actors": sorted(actor["Name"] for actor in actors),
        "jobs": [dict(job.config.metadata) for job in jobs],
        "groups": [group["name"] for group in groups],
    }))
"""


@pytest.mark.full
@pytest.mark.parametrize("dashboard", ["", "http://localhost:8265"])
def test_a_run_is_named_in_the_lists_of_ray_and_names_its_dashboard(tmp_path, dashboard, monkeypatch):
    # Ray's own variable for a dashboard behind a proxy; no dashboard is installed here.
    monkeypatch.setenv("RAY_OVERRIDE_DASHBOARD_URL", dashboard)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", RUN, str(tmp_path), str(port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["actors"] == ["agentrl found player 0", "agentrl found rank 0"]
    folder = tmp_path / "found"
    job = {"run": "found", "folder": str(folder), "prometheus": f"http://127.0.0.1:{port}/metrics"}
    assert job in found["jobs"]
    (group,) = found["groups"]
    assert re.fullmatch(r"agentrl found \(agentrl-[0-9a-f]{16}\)", group)
    assert read_status(folder).dashboard == dashboard
    report = (folder / "report.html").read_text()
    assert ("dashboard of Ray" in report) == bool(dashboard)
    line = f"Dashboard of Ray: {dashboard}, where all is named `agentrl found`"
    assert (line in done.stdout) == bool(dashboard)
