"""Supervised fine-tuning: the call behind `agentrl sft`."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from agentrl.assembly.cluster import run_cluster
from agentrl.assembly.config import SftConfig
from agentrl.assembly.load import listed_inactive, load_run
from agentrl.assembly.places import local_places
from agentrl.assembly.trainer import TrainerFactory
from agentrl.config import defaults, effective_values
from agentrl.records.history import Ending
from agentrl.run.leaving import stopped_in_time
from agentrl.run.parts import Records
from agentrl.run.results import SftResult
from agentrl.run.resuming import RunStart, attempt_at, start_of, with_restarts
from agentrl.run.sft_training import SftRun, data_paths
from agentrl.run.summary import records_of, results_written, show_files, stopped
from agentrl.runtime.collector import rare_collections
from agentrl.runtime.files import write_text
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON
from agentrl.view.console import RunConsole
from agentrl.view.report import ReportData, write_report
from agentrl.view.scores import ScoreRow
from agentrl.weights.hf.tensors import num_parameters

__all__ = ["SftResult", "sft"]


def sft(
    run: str | Path | None = None, *, resume: bool | int = False, quiet: bool = False, **settings: JSON
) -> SftResult:
    """The implementation of `agentrl.sft`, which checks first that all dependencies are installed."""
    config = load_run(run, settings, SftConfig)
    assert isinstance(config, SftConfig), "it was read as one"
    # Before a folder is made for the run.
    paths = data_paths(config)
    start = start_of(run, settings, resume=resume, kind=SftConfig)
    console = RunConsole(quiet=quiet)
    finished = with_restarts(start, console, partial(_attempt, paths=paths, console=console))
    _show(finished)
    imitated = finished.imitated
    return SftResult(
        start.folder.path,
        finished.steps,
        finished.losses,
        len(imitated.units),
        dict(imitated.left_out),
        tuple(finished.records.diagnoses.made),
    )


def _attempt(start: RunStart, paths: tuple[str, ...], console: RunConsole) -> SftRun:
    """One attempt at the run, to its end."""
    config, folder = start.config, start.folder
    assert isinstance(config, SftConfig), "it was read as one"
    with attempt_at(start, console) as begun:
        for line in (*(f"Warning: {warning}" for warning in start.warnings), *listed_inactive(config)):
            console.line(line)
        try:
            with rare_collections():
                return run_until_signal(_run(config, paths, Records.opened(config, folder, console, begun)))
        except (KeyboardInterrupt, SystemExit):
            for line in stopped(folder, "sft"):
                console.line(line)
            raise


async def _run(config: SftConfig, paths: tuple[str, ...], records: Records) -> SftRun:
    folder = records.folder
    async with AsyncExitStack() as stack:
        stack.push_async_callback(records.journal.close)
        stack.callback(records.metrics.close)
        # Ray ends with the thread that starts it, so it blocks this one.
        cluster = stack.enter_context(run_cluster(config, folder.path))
        places = cluster or local_places(config)
        trainers = TrainerFactory(config, folder.trainer, places)
        stack.push_async_callback(trainers.close)
        await stack.enter_async_context(records.monitor)
        await stack.enter_async_context(stopped_in_time(cluster, records.console.line))
        records.placed(places)
        records.monitor.follow(lambda: trainers.where)
        run = await SftRun.build(config, paths, records, trainers)
        with results_written(partial(_write_results, run), records.console.line):
            await run.train()
    return run


def _write_results(run: SftRun, ending: Ending) -> None:
    """Write summary.json (how the run ended, losses, diagnoses, what was imitated) and report.html.

    Raises:
        OSError: one of them cannot be written.
    """
    records, config = run.records, run.config
    summary: dict[str, JSON] = {
        "ended": ending,
        "steps": run.step,
        "losses": {str(step): loss for step, loss in run.losses.items()},
        "taken": len(run.imitated.units),
        "left_out": dict(run.imitated.left_out),
        "diagnoses": [asdict(diagnosis) for diagnosis in records.diagnoses.made],
        "stages": [stage._asdict() for stage in records.watch.stages],
    }
    write_text(records.folder.summary, json.dumps(summary, indent=1))
    size = num_parameters(run.source.config)
    steps = f"{run.steps} steps"
    if ending != "finished":
        steps = f"{ending} after {run.step} of {steps}"
    facts = {
        "data": ", ".join(data_paths(config)),
        "model": config.model.hf_checkpoint or f"fresh, {size:,} parameters",
        "SFT": f"{steps} of {config.sft.sft_batch_size}, {config.sft.num_epoch} epochs of "
        f"{len(run.imitated.units):,}",
        "seed": str(config.run.seed),
        **records.dashboard,
    }
    page = ReportData(
        title=records.folder.path.name,
        rows=_rows(run),
        records=records_of(records.folder),
        episodes=(),
        decode_token=lambda token: run.source.decode([token]),
        facts=facts,
        diagnoses=records.diagnoses.made,
        config=effective_values(config),
        defaults=defaults(type(config)),
    )
    write_report(page, records.folder.report)


def _show(run: SftRun) -> None:
    """Print the losses before and after, and the paths of the files."""
    if run.losses:
        run.records.console.table(_rows(run), title="Held-out conversations")
    show_files(run.records)


def _rows(run: SftRun) -> list[ScoreRow]:
    names = {"before SFT": 0, "after SFT": run.steps}
    return [ScoreRow(name, {"loss": run.losses[step]}) for name, step in names.items() if step in run.losses]
