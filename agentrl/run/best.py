"""The models of a run that ends: the last one, and the one that scored best, where the last one is worse."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping

from agentrl.assembly.config import RunConfig
from agentrl.run.parts import Records
from agentrl.types.seams import Trainer


async def save_models(
    trainer: Trainer, records: Records, scores: Mapping[int, float], config: RunConfig
) -> None:
    """Write the models. The trainer has the weights of the best one then.

    scores: `best_metric` of evaluated weights, by their iteration. Of weights that were better and have no
    checkpoint any more, nothing is written.

    Raises:
        TrainerError: a process of the trainer failed.
        OSError: a model could not be written.
    """
    folder = records.folder
    await trainer.save(str(folder.checkpoint))
    shutil.rmtree(folder.best, ignore_errors=True)
    if not scores or max(scores.values()) <= (last := scores[max(scores)]):
        return
    # It reads every byte of the checkpoint.
    checkpoint = await asyncio.to_thread(records.checkpoints.best_of, scores)
    if checkpoint is None or checkpoint.state.step >= max(scores):
        return
    if config.trainer.offloads_train:
        await trainer.onload()
    await trainer.load_state(checkpoint.trainer)
    await trainer.save(str(folder.best))
    records.console.line(
        f"Best:   {folder.best} (step {checkpoint.state.step}: {config.best_metric} "
        f"{max(scores.values()):.3f}; the last weights: {last:.3f})"
    )
