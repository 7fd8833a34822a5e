"""The processes of a run that compute: the trainer's ranks and the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from agentrl.assembly.cluster import EVALUATIONS, title_of
from agentrl.assembly.config import RunConfig
from agentrl.assembly.places import ProcessPlaces
from agentrl.assembly.trainer import TrainerFactory
from agentrl.engine.embedded.process import EngineProcess

EVAL_ENGINE = "evaluation"
"""The folder of an engine of evaluations alone, in that of the engine."""


class RunProcesses(NamedTuple):
    """trainers: starts the trainer's ranks. engine: the embedded engine's process; None = it has none.

    eval_engine: that of an engine of evaluations alone; None likewise. places: of each rank and server.
    """

    trainers: TrainerFactory
    engine: EngineProcess | None
    eval_engine: EngineProcess | None
    places: ProcessPlaces


@asynccontextmanager
async def run_processes(
    config: RunConfig,
    engine_folder: Path,
    trainer_folder: Path,
    places: ProcessPlaces,
) -> AsyncIterator[RunProcesses]:
    """The processes of a run; all of them have ended when the block has.

    The engines' processes start at once, and import torch while the world is built. The folders are for their
    output. places: as of `RunProcesses`.
    """
    embedded = config.engine.engine == "embedded" and config.rollout.replay is None
    hosted = embedded and not config.run.inline
    engine = EngineProcess(engine_folder) if hosted else None
    is_second = hosted and config.has_eval_engine
    name = f"{title_of(EVALUATIONS)}engine"
    eval_engine = EngineProcess(engine_folder / EVAL_ENGINE, name) if is_second else None
    trainers = TrainerFactory(config, trainer_folder, places)
    try:
        yield RunProcesses(trainers, engine, eval_engine, places)
    finally:
        for process in (engine, eval_engine):
            if process is not None:
                process.end()
        await trainers.close()
