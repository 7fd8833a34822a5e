"""A run that loses the machine of its rank and of its players, in two namespaces of its own.

    unshare -Urnm --fork --kill-child python -m benchmarks.cluster.lost_machine FOLDER STEPS

It prints one line of JSON: see `Measured`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import NamedTuple, cast
from unittest.mock import patch

import agentrl
from agentrl.assembly import cluster as assembly_of_clusters
from agentrl.assembly import trainer as assembly_of_trainers
from agentrl.assembly.keywords import TrainSettings
from agentrl.errors import TrainerError
from agentrl.processes.config import ClusterConfig
from agentrl.processes.placement import ClusterLayout
from agentrl.processes.ray.placement import RayPlacement, placed
from agentrl.processes.ray.session import RaySession, connected
from agentrl.records import read_metrics, reconcile
from agentrl.records.history import METRICS
from agentrl.trainer.plan import Plan
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.snapshots import Ranks
from agentrl.types import JSON, TrainBatch
from agentrl.types.seams import StepReport
from benchmarks.cluster.machines import kill_far, two_machines

PARTS = ("noticed", "ended", "placed", "started", "loaded", "trained")
"""What happens after the loss, in this order: the update fails; all processes of the attempt have ended; the
run has places again; its ranks have the model; and the checkpoint; a step is trained."""
NOTICED, ENDED, PLACED, STARTED, LOADED, TRAINED = PARTS
_DELAY_S = 0.2
_STEP_OF_LOSS = 3
# The rank and both players fit on either machine; the far one has more room, and gets them.
_NEAR_CPUS, _FAR_CPUS = 3, 8
SETTINGS: dict[str, JSON] = {
    "env": "Calculator-v0",
    "cluster": "ray",
    "num_layers": 2,
    "hidden_size": 128,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 4,
    # Each step is trained, though nothing is learned.
    "entropy_coef": 0.01,
    # Both attempts that are compared play their first batch: no groups of an earlier one go on.
    "max_staleness": 0,
    "num_rollout_workers": 2,
    "num_threads": 1,
    "save_interval": 1,
    "max_restarts": 1,
    "warm_start_steps": 0,
    "eval_episodes": 1,
}


class Measured(NamedTuple):
    """Seconds of each part after the loss, and of each part of a plain resume of the same run on the machine
    that is left; a part begins where the one before ends. step_s: of an iteration that nothing interrupts."""

    lost: dict[str, float]
    plain: dict[str, float]
    step_s: float


class _Times:
    """When something happened first since the last `begin` (seconds of `time.perf_counter`)."""

    def __init__(self) -> None:
        self._began_s, self._at_s = 0.0, dict[str, float]()

    def begin(self) -> None:
        self._began_s, self._at_s = time.perf_counter(), {}

    def note(self, name: str) -> None:
        self._at_s.setdefault(name, time.perf_counter())

    def parts(self) -> dict[str, float]:
        """How long each part took, in their order (seconds)."""
        at_s = sorted(self._at_s.items(), key=lambda item: item[1])
        begins = [self._began_s, *(end for _, end in at_s)]
        return {name: end - begin for (name, end), begin in zip(at_s, begins[:-1], strict=True)}


TIMES = _Times()


class _Watched(RankTrainer):
    """Notes when its calls end, and loses the far machine in the middle of one update."""

    num_updates = 0

    def __init__(self, ranks: Ranks, plan: Plan) -> None:
        super().__init__(ranks, plan)
        TIMES.note(STARTED)

    async def load_state(self, directory: str) -> None:
        """Note its end."""
        await super().load_state(directory)
        TIMES.note(LOADED)

    async def update(self, batch: TrainBatch) -> StepReport:
        """Note how it ends."""
        _Watched.num_updates += 1
        if _Watched.num_updates == _STEP_OF_LOSS:
            # It would be done too soon.
            os.kill(self.ranks.pids[0], signal.SIGSTOP)
            Timer(_DELAY_S, _lose).start()
        try:
            report = await super().update(batch)
        except TrainerError:
            TIMES.note(NOTICED)
            raise
        TIMES.note(TRAINED)
        return report


def _lose() -> None:
    TIMES.begin()
    kill_far()


@contextmanager
def _connected(
    config: ClusterConfig, folder: Path, environment: Mapping[str, str], metadata: Mapping[str, str]
) -> Iterator[RaySession]:
    TIMES.note(ENDED)
    with connected(config, folder, environment, metadata) as session:
        yield session


def _placed(session: RaySession, layout: ClusterLayout, timeout_s: float) -> RayPlacement:
    placement = placed(session, layout, timeout_s)
    TIMES.note(PLACED)
    return placement


def _measured(folder: Path, address: str, steps: int) -> Measured:
    """steps: to train after the loss, and again after the plain resume (count)."""
    num_rollout = _STEP_OF_LOSS + steps
    place = {"ray_address": address, "output_dir": str(folder), "name": "x"}
    settings = cast(TrainSettings, {**SETTINGS, **place, "num_rollout": num_rollout})
    agentrl.train(None, resume=False, quiet=True, **settings)
    lost = TIMES.parts()
    if (problems := reconcile(folder / "x").problems) or NOTICED not in lost:
        raise AssertionError(f"the run lost its machine, and then: {lost}, {problems}")
    TIMES.begin()
    agentrl.train(folder / "x", resume=True, quiet=True, num_rollout=num_rollout + steps)
    times = [row["time_s"] or 0.0 for row in read_metrics(folder / "x" / METRICS)]
    # The first step of an attempt waits for its processes.
    step_s = statistics.median(end - begin for begin, end in pairwise(times[-steps:]))
    return Measured(lost, TIMES.parts(), step_s)


def main(folder: Path, steps: int) -> None:
    """Print what was measured."""
    with (
        two_machines(_NEAR_CPUS, _FAR_CPUS) as address,
        patch.object(assembly_of_trainers, "RankTrainer", _Watched),
        patch.object(assembly_of_clusters, "connected", _connected),
        patch.object(assembly_of_clusters, "placed", _placed),
    ):
        measured = _measured(folder, address, steps)
    print(json.dumps(measured._asdict()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
