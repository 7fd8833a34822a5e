"""Training: the call behind `agentrl train`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.fleet import served_models
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.processes import Start, launched_processes
from agentrl.evaluation.report import EvalReport
from agentrl.run.folder import RunFolder
from agentrl.run.stages import Stage
from agentrl.run.summary import show, write_page, write_summary
from agentrl.run.training import TrainingRun
from agentrl.types import JSON
from agentrl.view.console import RunConsole

__all__ = ["TrainResult", "train"]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run.

    reports: by milestone ("before", "after warm start", "after RL", ...), then by mode
    (sampled, greedy). stages: with their durations.
    """

    folder: Path
    env_id: str
    reports: Mapping[str, Mapping[str, EvalReport]]
    stages: tuple[Stage, ...]


def train(run_file: str | Path | None = None, *, quiet: bool = False, **settings: JSON) -> TrainResult:
    """The implementation of `agentrl.train`, which checks first that all dependencies are installed."""
    config = load_config(run_file, settings)
    with launched_processes(config) as start:
        folder = RunFolder.create(config)
        console = RunConsole(quiet=quiet)
        for warning in config.warnings:
            console.line(f"Warning: {warning}")
        for line in listed_inactive(config):
            console.line(line)
        try:
            run = asyncio.run(_stages(config, folder, console, start))
        except KeyboardInterrupt:
            console.line(f"Stopped. What was finished is in {folder.path}.")
            raise
    write_summary(run)
    write_page(run)
    show(run)
    reports = {
        milestone.name: {mode: evaluation.report for mode, evaluation in milestone.evaluations.items()}
        for milestone in run.progress.milestones
    }
    return TrainResult(folder.path, config.env.env, reports, run.records.watch.stages)


async def _stages(config: RunConfig, folder: RunFolder, console: RunConsole, start: Start) -> TrainingRun:
    async with (
        served_models(config.engine, folder.engine, console.line) as addresses,
        start(folder.engine, folder.trainer) as processes,
    ):
        run = await TrainingRun.build(config, folder, console, addresses, processes)
        await _play(run, config, addresses)
    return run


async def _play(run: TrainingRun, config: RunConfig, addresses: Addresses) -> None:
    chosen, env = config.env.opponents, run.world.make_env()
    folder = None if config.run.inline else run.records.folder.engine / "opponents"
    setup = OpponentSetup(config.rendering, folder)
    try:
        async with opened_opponents(chosen, env, addresses, setup) as opponents:
            run_with_opponents = run.against(opponents)
            await run_with_opponents.evaluate("before")
            if config.warm_start.warm_start_steps:
                await run_with_opponents.warm_start()
                await run_with_opponents.evaluate("after warm start")
            if config.rollout.num_rollout:
                await run_with_opponents.reinforce()
                await run_with_opponents.evaluate("after RL")
    finally:
        await run.close()
