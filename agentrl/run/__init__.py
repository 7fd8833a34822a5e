"""Training: the call behind `agentrl train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.fleet import served_models
from agentrl.assembly.load import listed_inactive
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.processes import Start, launched_processes
from agentrl.collector import rare_collections
from agentrl.engine.config import EngineConfig
from agentrl.evaluation.report import EvalReport
from agentrl.processes import print_stacks_on_signal
from agentrl.run.model_config import write_model_config
from agentrl.run.parts import Records
from agentrl.run.resuming import attempt_at, run_until_signal, start_of
from agentrl.run.stages import StageTime
from agentrl.run.summary import show, write_page, write_summary
from agentrl.run.training import TrainingRun
from agentrl.types import JSON
from agentrl.view.console import RunConsole

__all__ = ["TrainResult", "train"]

UNSERVED = "http://127.0.0.1:9"
"""An address at which nothing is served (port 9: discard)."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run.

    reports: by milestone ("before", "after warm start", "after RL", ...), then by mode
    (sampled, greedy), of a named set of prompts by NAME/MODE. stages: with their durations.
    """

    folder: Path
    env_id: str
    reports: Mapping[str, Mapping[str, EvalReport]]
    stages: tuple[StageTime, ...]


def train(
    run: str | Path | None = None, *, resume: bool = False, quiet: bool = False, **settings: JSON
) -> TrainResult:
    """The implementation of `agentrl.train`, which checks first that all dependencies are installed."""
    start = start_of(run, settings, resume=resume)
    config, folder = start.config, start.folder
    print_stacks_on_signal()
    console = RunConsole(quiet=quiet)
    with launched_processes(config) as launch, attempt_at(start, console) as begun:
        for warning in (*config.warnings, *start.warnings):
            console.line(f"Warning: {warning}")
        for line in listed_inactive(config):
            console.line(line)
        try:
            with rare_collections():
                finished = run_until_signal(
                    _stages(config, Records.opened(config, folder, console, begun), launch)
                )
        except (KeyboardInterrupt, SystemExit):
            console.line(f"Stopped. Resume it with `agentrl train {folder.path} --resume`.")
            raise
        write_summary(finished)
        write_page(finished)
    show(finished)
    reports = {
        milestone.name: {mode: evaluation.report for mode, evaluation in milestone.evaluations.items()}
        for milestone in finished.progress.milestones
    }
    return TrainResult(folder.path, config.env.env, reports, finished.records.watch.stages)


async def _stages(config: RunConfig, records: Records, launch: Start) -> TrainingRun:
    folder = records.folder
    # A replay serves nothing; arguments of its environment that name a model still need an address.
    engine = config.engine if config.rollout.replay is None else EngineConfig()
    unserved = dict.fromkeys(config.engine.sglang_models.keys() - engine.sglang_models.keys(), UNSERVED)
    async with (
        served_models(engine, folder.engine, records.console.line) as served,
        launch(folder.engine, folder.trainer) as processes,
    ):
        addresses = {**unserved, **served}
        run = await TrainingRun.build(config, records, addresses, processes)
        if config.observe.log_model_config:
            for line in write_model_config(run.progress.source, config, folder.path):
                records.console.line(line)
        await _play(run, config, addresses)
    return run


async def _play(run: TrainingRun, config: RunConfig, addresses: Addresses) -> None:
    chosen = config.env.opponents if config.rollout.replay is None else {}
    env = run.world.make_env()
    folder = None if config.run.inline else run.records.folder.engine / "opponents"
    setup = OpponentSetup(config.rendering, folder)
    try:
        async with opened_opponents(chosen, env, addresses, setup) as opponents:
            run_with_opponents = run.against(opponents)
            if run.records.origin is None:
                await run_with_opponents.evaluate("before")
                if config.warm_starts:
                    await run_with_opponents.warm_start()
                    await run_with_opponents.evaluate("after warm start")
            if config.rollout.num_rollout and config.rollout.debug_rollout_only:
                await run_with_opponents.record()
            elif config.rollout.num_rollout:
                await run_with_opponents.reinforce()
                await run_with_opponents.evaluate("after RL")
    finally:
        await run.close()
