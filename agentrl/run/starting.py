"""The start of a run: its servers and the trainer's ranks start at the same time.

servers      check | import | load weights | capture graphs |
ranks              | import | join, load weights |                      the networks of RL are built at once
on one GPU         | import |                          | load weights   where the servers have their caches

Where one side fails, the other one is ended, and the failure is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import TypeVar

from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.cards import shared_gpus
from agentrl.assembly.config import RunConfig
from agentrl.assembly.trainer import TrainerFactory
from agentrl.weights.hf.fresh import draw_in_subprocess
from agentrl.weights.hf.source import ModelSource

R = TypeVar("R")


async def ranks_begun(
    config: RunConfig,
    source: ModelSource,
    algorithm: Algorithm | None,
    trainers: TrainerFactory,
    *,
    is_resumed: bool,
) -> ModelSource:
    """Start the ranks, as far as they may start beside servers; the model, whose weights may then be drawn.

    algorithm: None = the run only plays, and there are no ranks.

    Raises:
        UserError: the trainer cannot train the model.
    """
    if algorithm is None:
        return source
    trainers.prepare(source)
    if not builds_at_once(config, is_resumed=is_resumed):
        trainers.begin_to_import()
        return source
    await asyncio.to_thread(draw_in_subprocess, source)
    source = replace(source, seed=None)
    trainers.begin(source, algorithm.loss)
    return source


def builds_at_once(config: RunConfig, *, is_resumed: bool) -> bool:
    """Whether the ranks build the networks of RL while the servers start.

    Not after a warm start, whose weights come first; not where both take turns; and not on a GPU of a server:
    it sizes its cache by the memory that is free before and after it loads its weights.
    """
    engine, trainer = config.engine, config.trainer
    starts_servers = engine.engine == "sglang" and engine.sglang_url is None
    waits = (config.warm_starts and not is_resumed) or config.rollout.replay is not None
    takes_turns = trainer.offloads_rollout or trainer.offloads_train
    may_build = bool(config.rollout.num_rollout) and not (waits or takes_turns or config.run.inline)
    return starts_servers and may_build and not shared_gpus(config)


async def unless_a_rank_ends(trainers: TrainerFactory, engines: Coroutine[None, None, R]) -> R:
    """The engines, once they are up. Where a rank ends before, so do they.

    Raises:
        TrainerError: a rank ended.
    """
    starting = asyncio.ensure_future(engines)
    try:
        ranks = trainers.starting
        if ranks is not None:
            await asyncio.wait({starting, ranks}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                # It raises the error of a rank.
                ranks.result()
        return await starting
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
