"""One training run of the benchmark: from the warm start of its seed, to a score on held-out tasks."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentrl.types import JSON
from benchmarks.algorithms.delayed import DelayedSink
from benchmarks.algorithms.settings import WARM_START, AlgorithmArm
from benchmarks.cache import cached_result
from benchmarks.config import AlgorithmsBench

_QUIET: dict[str, JSON] = {"use_tensorboard": False, "eval_episodes": 1, "eval_interval": 1_000_000}


@dataclass(frozen=True, slots=True)
class Job:
    """An arm with a seed."""

    bench: AlgorithmsBench
    arm: AlgorithmArm
    seed: int

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.bench.output_dir) / self.name

    @property
    def name(self) -> str:
        """The run's name."""
        return "-".join("".join(c if c.isalnum() or c == "_" else " " for c in self.arm.name).split()) + (
            f"-seed{self.seed}"
        )

    @property
    def warm_start(self) -> Job:
        """The job whose checkpoint this one starts from."""
        return Job(self.bench, AlgorithmArm(WARM_START), self.seed)

    @property
    def checkpoint(self) -> Path:
        """The trained checkpoint."""
        return self.folder / "checkpoint"


def run_job(job: Job) -> dict[str, JSON]:
    """Train and score, or read the result of an earlier call.

    Returns:
        score: of the trained policy, sampled. metrics: the means over the iterations.

    Raises:
        UserError: the run file is wrong, or the folder holds other files.
    """
    scored: dict[str, JSON] = job.bench.model_dump(
        mode="json", include={"run_file", "split", "episodes", "num_rollout"}
    )
    arm: dict[str, JSON] = asdict(job.arm)
    return cached_result(job.folder, {**scored, "seed": job.seed, "arm": arm}, lambda: _trained(job))


def _trained(job: Job) -> dict[str, JSON]:
    from agentrl.evaluation.model import evaluate

    env_id = _warm_start(job) if job.arm.name == WARM_START else asyncio.run(_reinforce(job))
    report = evaluate(
        env_id,
        str(job.checkpoint),
        n=job.bench.episodes,
        split=job.bench.split,
        seed=job.seed,
        quiet=True,
    )
    return {"score": report.as_json(), "metrics": _means(job.folder / "metrics.jsonl")}


def _warm_start(job: Job) -> str:
    from agentrl.run import train

    own: dict[str, JSON] = {"name": job.name, "output_dir": job.bench.output_dir, "seed": job.seed}
    return train(job.bench.run_file, quiet=True, resume=False, num_rollout=0, **_QUIET, **own).env_id


async def _reinforce(job: Job) -> str:
    """RL without a warm start, with weights delayed by the arm's lag; returns the environment's id."""
    from agentrl.assembly.load import load_config
    from agentrl.assembly.places import local_places
    from agentrl.assembly.processes import run_processes
    from agentrl.config import write_toml
    from agentrl.run.checkpoints import Begun
    from agentrl.run.folder import RunFolder
    from agentrl.run.parts import Records
    from agentrl.run.starting import built
    from agentrl.view.console import RunConsole

    settings: dict[str, JSON] = {
        "hf_checkpoint": str(job.warm_start.checkpoint),
        "warm_start_steps": 0,
        "num_rollout": job.bench.num_rollout,
        "name": job.name,
        "output_dir": job.bench.output_dir,
        "seed": job.seed,
        **job.arm.settings,
    }
    config = load_config(job.bench.run_file, {**_QUIET, **settings})
    folder = RunFolder.of(config)
    folder.check_free(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_toml(config, folder.config)
    async with run_processes(config, folder.engine, folder.trainer, local_places(config)) as processes:
        records = Records.opened(config, folder, RunConsole(quiet=True), Begun(1, None))
        run = await built(config, records, {}, processes)
        assert run.sink is not None, "a run that plays has an engine"
        run = replace(run, sink=DelayedSink(run.sink, job.arm.lag))
        try:
            await run.reinforce()
        finally:
            await run.close()
    return config.env.env


def _means(path: Path) -> dict[str, JSON]:
    """The mean of each metric over the iterations that have it."""
    from agentrl.records import read_metrics

    by_name: dict[str, list[float]] = {}
    for record in read_metrics(path):
        for name, value in record.items():
            if value is not None and name.startswith(("train/", "rollout/raw_reward")):
                by_name.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in by_name.items()}


def mean_of(row: Mapping[str, JSON]) -> float:
    """The mean score of a result."""
    score = row["score"]
    mean = score["mean"] if isinstance(score, dict) else None
    if not isinstance(mean, int | float):
        raise TypeError(f"expected a score, found {score!r}")
    return float(mean)
