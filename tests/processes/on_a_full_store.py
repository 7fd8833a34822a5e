"""Runs on a Ray whose object store another program has filled: run in namespaces of its own.

    unshare -Urnm python -m tests.processes.on_a_full_store SCENARIO FOLDER

It prints one line of JSON. Ray's own files are on a disk of their own, the run's are not.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from agentrl.errors import DiskError, TrainerError
from agentrl.records.history import attempts
from tests.flow.runs import train
from tests.flow.test_resume import accounted
from tests.processes.machines import one_machine, wait_for

HOST, PORT = "127.0.0.1", 6379
ADDRESS = f"{HOST}:{PORT}"
# About the least that Ray takes.
STORE_BYTES = 80_000_000
DISK = Path("/run/disk")
SETTINGS = {
    "cluster": "ray",
    "ray_address": ADDRESS,
    "inline": False,
    "num_rollout": 4,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 2,
    "num_threads": 1,
    "save_interval": 1,
}
# Puts objects into the store, and keeps what it has mapped, which Ray cannot move.
FILLING = f"""
import sys, time, numpy, ray
from ray.exceptions import RayError
ray.init("{ADDRESS}", log_to_driver=False)
kept = []
def fill(size):
    try:
        while True:
            kept.append(ray.put(numpy.zeros(size, numpy.uint8)))
            kept.append(ray.get(kept[-1]))
    except RayError:
        pass
if sys.argv[1] == "spilled":
    kept += [ray.put(numpy.zeros(1 << 24, numpy.uint8)) for _ in range(8)]
else:
    print("connected", flush=True)
    sys.stdin.readline()
    for size in (1 << 20, 1 << 16):
        fill(size)
print("full", flush=True)
while True:
    if sys.argv[1] != "spilled":
        fill(1 << 12)
    time.sleep(0.05)
"""


@contextmanager
def ray_on_a_disk(megabytes: int):
    for line in (
        "mount -t tmpfs none /run",
        "ip link set lo up",
        f"mkdir {DISK}",
        f"mount -t tmpfs -o size={megabytes}m none {DISK}",
    ):
        subprocess.run(line.split(), check=True)
    before, tempfile.tempdir = tempfile.tempdir, str(DISK)
    with one_machine(HOST, PORT, 2, [f"--object-store-memory={STORE_BYTES}"]) as place:
        tempfile.tempdir = before
        yield place


@contextmanager
def another_program(how: str):
    command = [sys.executable, "-c", FILLING, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


def spilled(folder: Path) -> dict[str, object]:
    """More than the store holds is there before the run begins, and Ray moves it to the disk."""
    with ray_on_a_disk(1000) as place, another_program("spilled"):
        train("Talkative", folder, "x", **SETTINGS)
        written = [path for path in place.rglob("*ray_spilled_objects*/*") if path.stat().st_size > 1 << 20]
    return {"spilled": len(written), "trained": accounted(folder / "x").trained}


def full(folder: Path) -> dict[str, object]:
    """In mid-run neither the store nor the disk has room any more; then both have it again."""
    metrics, filler = folder / "x" / "metrics.jsonl", DISK / "filler"

    def fill(process):
        wait_for(lambda: metrics.exists() and '"train/loss"' in metrics.read_text())
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], check=False, stderr=subprocess.DEVNULL
        )
        process.stdin.write("fill\n")
        process.stdin.flush()

    out, message = io.StringIO(), ""
    with ray_on_a_disk(300):
        with another_program("full") as process:
            threading.Thread(target=fill, args=(process,), daemon=True).start()
            try:
                with redirect_stdout(out):
                    train("Talkative", folder, "x", quiet=False, **{**SETTINGS, "num_rollout": 1000})
            except (DiskError, TrainerError) as error:
                message = str(error)
        filler.unlink()
        steps = metrics.read_text().count('"train/loss"')
        train("Talkative", folder, "x", resume=True, **{**SETTINGS, "num_rollout": steps + 2})
    return {
        "message": message,
        "shown": out.getvalue(),
        "attempts": [each.ended for each in attempts(folder / "x")],
        "trained": accounted(folder / "x").trained,
    }


if __name__ == "__main__":
    scenario = {"spilled": spilled, "full": full}[sys.argv[1]]
    print(json.dumps(scenario(Path(sys.argv[2]))), flush=True)
