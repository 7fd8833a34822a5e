"""The commands of the guide "Run on Ray" and the recipes' scripts, on two machines: in namespaces of its own.

    unshare -Urnmpf --mount-proc python -m tests.processes.guide_scripts SCENARIO FOLDER

It prints one line of JSON. SLURM is not here: `srun` and `scontrol` are scripts that know two hosts, near and
far. All else is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from agentrl.cli.recipes import FOLDER
from agentrl.processes.interfaces import address_to
from agentrl.records import reconcile
from agentrl.records.history import attempts
from agentrl.records.status import read_status
from tests.docs.blocks import FENCE, ROOT
from tests.processes.machines import FAR, IN_FAR, NEAR, connect, wait_for

GUIDE = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
HOSTS = f"127.0.0.1 localhost\n{NEAR} near\n{FAR} far\n"
# In place of the host's own, whose resolver knows nothing of these networks.
SWITCH = "hosts: files\n"
DASHBOARD = "http://127.0.0.1:8265"
RUN = """
[run]
name = "x"
output_dir = "{folder}"
num_threads = 1
[env]
env = "Calculator-v0"
[model]
num_layers = 1
hidden_size = 64
[rollout]
num_rollout = {num_rollout}
rollout_batch_size = 4
n_samples_per_prompt = 2
[algorithm]
entropy_coef = 0.01
[eval]
eval_episodes = 2
"""
ON_TWO_MACHINES = """
[trainer]
trainer = "megatron"
[cluster]
num_cpus_per_rank = {num_cpus}
[layout]
actor_num_nodes = 2
actor_num_gpus_per_node = 1
"""
SRUN = f"""#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 == --exclude=near ]] && where="{" ".join(IN_FAR)}"
    shift
done
exec $where "$@"
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames near,far" ]] && printf 'near\\nfar\\n'
"""


def script(words: str) -> str:
    """The one block of the guide with these words."""
    (text,) = (match["text"] for match in FENCE.finditer(GUIDE) if words in match["text"])
    return text


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def started(command: str, folder: Path, cwd: Path | None = None, **variables: str) -> subprocess.Popen[bytes]:
    """A shell with a command, in a session of its own."""
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder if cwd is None else cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=(folder / "out").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_machines() -> None:
    """End every Ray of these namespaces, as a scheduler does after a job."""
    subprocess.run(["ray", "stop", "--force"], stdout=subprocess.DEVNULL, check=True)


def num_trained(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count('"train/loss"') if metrics.exists() else 0


def result_of(folder: Path) -> dict[str, object]:
    return {
        "out": (folder / "out").read_text(errors="replace"),
        "attempts": [[attempt.ended, attempt.resumed_from] for attempt in attempts(folder / "x")],
        "where": {name: process.where for name, process in read_status(folder / "x").processes.items()},
        "problems": reconcile(folder / "x").problems,
        "trained": num_trained(folder / "x"),
    }


def slurm(folder: Path) -> dict[str, object]:
    """A job that its scheduler tells of its end, and one that goes on with the run."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        write_program(folder / "bin" / name, text)
    (folder / "run.toml").write_text(RUN.format(folder=folder, num_rollout=40))
    with (folder / "run.toml").open("a") as file:
        file.write(ON_TWO_MACHINES.format(num_cpus=os.cpu_count()))
    command = f"exec bash {FOLDER / 'slurm.sh'} run.toml"
    facts = {"SLURM_JOB_NODELIST": "near,far", "SLURM_NNODES": "2"}

    job = started(command, folder, **facts, SLURM_JOB_ID="1")
    wait_for(lambda: num_trained(folder / "x") >= 2 or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    job.wait(120)
    trained = num_trained(folder / "x")
    end_machines()
    job = started(command, folder, **facts, SLURM_JOB_ID="2")
    code = job.wait(300)
    end_machines()
    return {**result_of(folder), "trained before": trained, "code": code}


def job(folder: Path) -> dict[str, object]:
    """The run as a job of a cluster of two machines."""
    (folder / "run.toml").write_text(RUN.format(folder=folder, num_rollout=2))
    head, other = script("on the first machine, say").splitlines()
    started(f"{head.partition('#')[0]} --block", folder, Path("/"))
    wait_for(lambda: b"Ray runtime started" in (folder / "out").read_bytes(), 120.0)
    started(" ".join([*IN_FAR, changed(other, "10.0.0.7", NEAR).partition("#")[0], "--block"]), folder)
    submitted = started(f"bash {FOLDER / 'ray-job.sh'} {folder}/run.toml", folder)
    code = submitted.wait(300)
    found = {path: answer(f"{DASHBOARD}/{path}") for path in ("api/jobs/", "api/v0/actors?detail=1")}
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    end_machines()
    return {
        **result_of(folder),
        "code": code,
        "addresses": [address_to(host) for host in (FAR, NEAR, "127.0.0.1")],
        "dashboard": read_status(folder / "x").dashboard,
        "jobs": [job["metadata"] for job in found["api/jobs/"]],
        "actors": [actor["name"] for actor in found["api/v0/actors?detail=1"]["data"]["result"]["result"]],
        "listening": [line.split()[3] for line in listening.splitlines()],
    }


def answer(url: str) -> object:
    with urllib.request.urlopen(url) as reply:
        return json.loads(reply.read())


def main(scenario: str, folder: Path) -> dict[str, object]:
    (folder / "bin").mkdir()
    for path, text in {"/etc/hosts": HOSTS, "/etc/nsswitch.conf": SWITCH}.items():
        own = folder / Path(path).name
        own.write_text(text)
        subprocess.run(["mount", "--bind", own, path], check=True)
    connect()
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="r") as place:
        os.environ |= {
            "PATH": os.pathsep.join(path),
            "RAY_TMPDIR": f"{place}/r",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        return {"slurm": slurm, "job": job}[scenario](folder)


if __name__ == "__main__":
    begun = time.monotonic()
    result = main(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps({**result, "s": time.monotonic() - begun}), flush=True)
