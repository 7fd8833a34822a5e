"""Training: the call behind `agentrl train`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.cluster import run_cluster
from agentrl.assembly.config import RunConfig
from agentrl.assembly.fleet import served_models
from agentrl.assembly.load import listed_inactive
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.places import ProcessPlaces, local_places
from agentrl.assembly.processes import run_processes
from agentrl.engine.config import EngineConfig
from agentrl.errors import NoSignalError
from agentrl.processes.child import print_stacks_on_signal
from agentrl.run.leaving import stopped_in_time
from agentrl.run.model_config import write_model_config
from agentrl.run.parts import Records
from agentrl.run.players import players_of
from agentrl.run.results import TrainResult
from agentrl.run.resuming import RunStart, attempt_at, start_of, with_restarts
from agentrl.run.starting import built
from agentrl.run.summary import (
    idle_sentence,
    results_written,
    show,
    show_files,
    stopped,
    write_results,
)
from agentrl.run.training import TrainingRun
from agentrl.runtime.collector import rare_collections
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON
from agentrl.view.console import RunConsole

__all__ = ["TrainResult", "train"]

UNSERVED = "http://127.0.0.1:9"
"""An address at which nothing is served (port 9: discard)."""


def train(
    run: str | Path | None = None, *, resume: bool | int = False, quiet: bool = False, **settings: JSON
) -> TrainResult:
    """The implementation of `agentrl.train`, which checks first that all dependencies are installed.

    Raises:
        NoSignalError: the run has ended, since nothing that it played gave a gradient; it is all recorded.
    """
    start = start_of(run, settings, resume=resume)
    print_stacks_on_signal()
    console = RunConsole(quiet=quiet)
    finished = with_restarts(start, console, partial(_attempt, console=console))
    show(finished)
    reports = {
        milestone.name: {mode: evaluation.report for mode, evaluation in milestone.evaluations.items()}
        for milestone in finished.progress.milestones
    }
    records = finished.records
    diagnoses = tuple(records.diagnoses.made)
    return TrainResult(start.folder.path, start.config.env.env, reports, records.watch.stages, diagnoses)


def _attempt(start: RunStart, console: RunConsole) -> TrainingRun:
    """One attempt at the run, to its end."""
    config, folder = start.config, start.folder
    with attempt_at(start, console) as begun:
        for warning in (*config.warnings, *start.warnings):
            console.line(f"Warning: {warning}")
        for line in listed_inactive(config):
            console.line(line)
        try:
            with rare_collections():
                finished = run_until_signal(
                    _built_and_played(config, Records.opened(config, folder, console, begun))
                )
        except (KeyboardInterrupt, SystemExit):
            for line in stopped(folder, "train"):
                console.line(line)
            raise
        if finished.is_idle:
            show_files(finished.records)
            raise NoSignalError(idle_sentence(finished))
    return finished


async def _built_and_played(config: RunConfig, records: Records) -> TrainingRun:
    async with opened_run(config, records) as run:
        await _stages(run)
    return run


@asynccontextmanager
async def opened_run(config: RunConfig, records: Records) -> AsyncIterator[TrainingRun]:
    """All parts and processes of a run; after the block its results are written, and it has ended."""
    folder = records.folder
    # A replay serves nothing; arguments of its environment that name a model still need an address.
    engine = config.engine if config.rollout.replay is None else EngineConfig()
    unserved = dict.fromkeys(config.engine.sglang_models.keys() - engine.sglang_models.keys(), UNSERVED)
    async with AsyncExitStack() as stack:
        # Ray ends with the thread that starts it, so it blocks this one.
        cluster = stack.enter_context(run_cluster(config, folder.path))
        places = cluster or local_places(config)
        await stack.enter_async_context(records.monitor)
        records.placed(places)
        served = await stack.enter_async_context(
            served_models(engine, folder.engine, records.console.line, places)
        )
        processes = await stack.enter_async_context(
            run_processes(config, folder.engine, folder.trainer, places)
        )
        addresses = {**unserved, **served}
        await stack.enter_async_context(stopped_in_time(cluster, records.console.line))
        run = await built(config, records, addresses, processes)
        if config.observe.log_model_config:
            for line in write_model_config(run.progress.source, config, folder.path):
                records.console.line(line)
        yield await stack.enter_async_context(_against_opponents(run, config, addresses, places))


@asynccontextmanager
async def _against_opponents(
    run: TrainingRun, config: RunConfig, addresses: Addresses, places: ProcessPlaces
) -> AsyncIterator[TrainingRun]:
    """The run with what plays its groups, and the agents that are not trained."""
    chosen = config.env.opponents if config.rollout.replay is None else {}
    env = run.world.make_env()
    folder = None if config.run.inline else run.records.folder.engine / "opponents"
    setup = OpponentSetup(config.rendering, folder)
    with results_written(partial(write_results, run), run.records.console.line):
        try:
            players = players_of(config, run.progress.source, run.engine, run.records, addresses, places)
            async with opened_opponents(chosen, env, addresses, setup) as opponents, players or nullcontext():
                yield replace(run.against(opponents), players=players)
        finally:
            await run.close()


async def _evaluate_first(run: TrainingRun, name: str) -> None:
    """Score the model that RL begins with, where that is wanted."""
    if not run.config.eval.skip_eval_before_train:
        await run.evaluations.evaluate(name)


async def _stages(run: TrainingRun) -> None:
    """The stages that the run has not been through, one after another."""
    rollout = run.config.rollout
    if run.records.origin is None:
        await _evaluate_first(run, "before")
        if run.config.warm_starts:
            await run.warm_start()
            await _evaluate_first(run, "after warm start")
    if rollout.num_rollout and rollout.debug_rollout_only:
        await run.record()
    elif rollout.num_rollout:
        await run.reinforce()
        await run.evaluations.evaluate("after RL")
