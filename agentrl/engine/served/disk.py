"""Weights of a model directory on their way into an engine that serves."""

from __future__ import annotations

import asyncio

import torch

from agentrl.checkpoints.loading import open_directory
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.weights import NamedTensors, checksum, deliver, named_weights


async def update_from_disk(engine: EmbeddedEngine, directory: str, version: int) -> int:
    """Serve the weights of a directory as `version`; requests that run go on with them. Gives their checksum.

    Raises:
        ModelLoadError: the directory is missing or broken.
        EngineError: it holds another model; the old weights serve on.
    """
    named, told = await asyncio.to_thread(_loaded, directory)
    await deliver(named, engine.sink, version)
    return told


def _loaded(directory: str) -> tuple[list[tuple[str, torch.Tensor]], int]:
    named: NamedTensors = named_weights(open_directory(directory, torch.float32))
    listed = list(named)
    return listed, checksum(listed)
