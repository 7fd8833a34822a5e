"""A section of the benchmark of Ray: what it costs a run that a machine is killed under it.

A run trains on the far one of two machines, network namespaces of this one, where its rank and its players
are. That machine is killed in the middle of an update; the run resumes by itself on the other one. Then it
has ended, and is resumed by hand, on that machine: the baseline.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE

from agentrl.errors import ConfigError
from agentrl.types import JSON
from benchmarks.cluster.context import Cluster, RayBench
from benchmarks.cluster.lost_machine import ENDED, NOTICED, PARTS, SETTINGS, Measured
from benchmarks.cluster.machines import NAMESPACES
from benchmarks.compare import figures_of

_PROGRAM = "benchmarks.cluster.lost_machine"


async def node(cluster: Cluster, bench: RayBench) -> Mapping[str, JSON]:
    """The time from the kill to the next trained step, against that of a plain resume, and their parts."""
    runs = [await _run(cluster.folder / f"node-{repeat}", bench) for repeat in range(bench.node_repeats)]
    lost = figures_of([sum(run.lost.values()) for run in runs])
    plain = figures_of([sum(run.plain.values()) for run in runs])
    step = figures_of([run.step_s for run in runs])
    costs = [sum(run.lost.values()) / (sum(run.plain.values()) + run.step_s) for run in runs]
    parts = {part: figures_of([run.lost[part] for run in runs]) for part in PARTS}
    of_plain = {part: figures_of([run.plain[part] for run in runs]) for part in PARTS if part != NOTICED}
    return {
        "summary": {
            "kill_to_next_step_s": lost.median,
            "plain_resume_to_next_step_s": plain.median,
            "step_s": step.median,
            "kill_over_plain_resume_and_a_step": figures_of(costs).median,
            **{f"kill_{part}_s": one.median for part, one in parts.items()},
            **{f"plain_{part}_s": one.median for part, one in of_plain.items() if part != ENDED},
        },
        "kill_to_next_step": lost._asdict(),
        "plain_resume_to_next_step": plain._asdict(),
        "step": step._asdict(),
        "ratio": figures_of(costs)._asdict(),
        "parts": {part: one._asdict() for part, one in parts.items()},
        "parts_of_plain_resume": {part: one._asdict() for part, one in of_plain.items()},
        "run": SETTINGS,
    }


async def _run(folder: Path, bench: RayBench) -> Measured:
    """One run, in namespaces of its own.

    Raises:
        ConfigError: this machine has no namespaces for users.
    """
    folder.mkdir()
    command = [*NAMESPACES, sys.executable, "-m", _PROGRAM, str(folder), str(bench.node_steps)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise ConfigError(f"{' '.join(command)} failed; it needs `ip`, and namespaces that a user may make.")
    return Measured(**json.loads(out.splitlines()[-1]))
