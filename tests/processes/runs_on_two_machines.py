"""A whole run whose rank and players are on the far one of two machines, which it loses in mid-update.

    unshare -Urnm python -m tests.processes.runs_on_two_machines LOSS FOLDER

Run in namespaces of its own, it prints one line of JSON. LOSS is `killed` or `cut_off`.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path

from agentrl.records import reconcile
from agentrl.records.history import attempts
from agentrl.records.status import read_status
from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import train
from tests.flow.test_resume import accounted
from tests.processes.machines import (
    bring_back_far,
    cut_off_far,
    kill_far,
    processes_of_far,
    two_machines,
    wait_for,
)
from tests.trainer.megatron.launching import words_of

SETTINGS = {
    "cluster": "ray",
    "inline": False,
    "num_rollout": 5,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 2,
    "num_threads": 1,
    "max_staleness": 1,
    "correction": "tis",
    "save_interval": 1,
    "max_restarts": 1,
    "num_rollout_workers": 2,
}
LOSSES = {"killed": kill_far, "cut_off": cut_off_far}
# Ray's own values have it notice a machine that is cut off after a minute.
QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def strike_in_the_third_update(folder: Path, strike) -> list[dict[str, str]]:
    """The call is on its way to a rank that stands still; then the machine is lost. Returns where all was."""
    update, updates, before = RankTrainer.update, count(1), []

    def lose(rank):
        time.sleep(0.5)
        strike()
        # On a machine that is cut off it goes on.
        if os.path.exists(f"/proc/{rank}"):
            os.kill(rank, signal.SIGCONT)

    async def updated(self, batch):
        number = next(updates)
        if number == 3:
            (rank,) = self.ranks.pids
            # The status is up to a second old, and these steps are shorter.
            while str(rank) not in places_in(folder).get("rank 0", ""):
                await asyncio.sleep(0.1)
            before.append(places_in(folder))
            os.kill(rank, signal.SIGSTOP)
            threading.Thread(target=lose, args=(rank,)).start()
        elif number == 5 and strike is cut_off_far:
            # What is left there must not disturb the run that has resumed.
            bring_back_far()
        return await update(self, batch)

    RankTrainer.update = updated
    return before


def places_in(folder: Path) -> dict[str, str]:
    """Where each process of a run is, or was last."""
    return {name: process.where for name, process in read_status(folder).processes.items()}


def of_the_run(pid: int) -> bool:
    """Whether a process of the far machine works for a run."""
    words = b" ".join(words_of(pid))
    return b"ray::" in words or b"agentrl" in words


def main(loss: str, folder: Path) -> dict[str, object]:
    variables = {} if loss == "killed" else QUICK
    # The far machine has the most room, and holds all; the near one has just enough.
    with two_machines(near_cpus=3, far_cpus=8, variables=variables) as address:
        before = strike_in_the_third_update(folder / "x", LOSSES[loss])
        out = io.StringIO()
        with redirect_stdout(out):
            train("Talkative", folder, "x", quiet=False, **SETTINGS, ray_address=address)
        begun = time.monotonic()
        wait_for(lambda: not any(map(of_the_run, processes_of_far())), 120.0)
        left_s = time.monotonic() - begun
    return {
        "attempts": [(each.ended, each.resumed_from) for each in attempts(folder / "x")],
        "problems": reconcile(folder / "x").problems,
        "trained": accounted(folder / "x").trained,
        "before": before,
        "after": places_in(folder / "x"),
        "left_s": left_s,
        "shown": re.sub(r"\s+", " ", out.getvalue()),
    }


if __name__ == "__main__":
    os.environ["COLUMNS"] = "1000"
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))), flush=True)
