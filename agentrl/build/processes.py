"""The processes of a run that compute, and their end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from agentrl.build.config import RunConfig
from agentrl.build.trainer import TrainerFactory
from agentrl.engine.embedded.process import EngineProcess
from agentrl.trainer.launch.guests import Guests


class RunProcesses(NamedTuple):
    """trainers: starts the trainer's ranks. engine: the embedded engine's process; None = it has none."""

    trainers: TrainerFactory
    engine: EngineProcess | None


@asynccontextmanager
async def run_processes(
    config: RunConfig, engine_folder: Path, trainer_folder: Path, guests: Guests | None = None
) -> AsyncIterator[RunProcesses]:
    """The processes of a run; all of them have ended when the block has.

    The engine's starts at once, and imports torch while the world is built. The folders are for what they
    print. guests: Megatron's ranks that a launcher started.
    """
    hosted = config.engine.engine == "embedded" and not config.run.inline
    engine = EngineProcess(engine_folder) if hosted else None
    trainers = TrainerFactory(config, trainer_folder, guests)
    try:
        yield RunProcesses(trainers, engine)
    finally:
        if engine is not None:
            engine.end()
        await trainers.close()
