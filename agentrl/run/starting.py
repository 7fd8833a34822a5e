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

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.cards import shared_gpus
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, bounded
from agentrl.assembly.env import run_env_factory
from agentrl.assembly.model import expert_layers_of
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.assembly.processes import RunProcesses
from agentrl.assembly.trainer import TrainerFactory
from agentrl.envs.opponents import check_opponents
from agentrl.run.credit import check_served
from agentrl.run.evaluations import Evaluations
from agentrl.run.held_out import HeldOut, own_sets
from agentrl.run.parts import (
    Progress,
    Records,
    World,
    algorithm_of,
    engines_of,
    facts_of,
    filters_of,
    scoring_of,
    source_of,
)
from agentrl.run.pretraining import CriticData
from agentrl.run.replay import Replay
from agentrl.run.training import BUILD, TrainingRun
from agentrl.weights.hf.fresh import draw_in_subprocess
from agentrl.weights.hf.source import ModelSource

R = TypeVar("R")


async def built(
    config: RunConfig, records: Records, addresses: Addresses, processes: RunProcesses
) -> TrainingRun:
    """All parts of a run. addresses: of the models that are served besides the policy.

    Raises:
        UserError: the environment, a function by path or the model is wrong, or an engine does not start.
    """
    console, origin, trainers = records.console, records.origin, processes.trainers
    with records.watch.stage(BUILD), console.stage(BUILD, 1) as bar, records.monitor.starting(bar):
        make_env = run_env_factory(config, addresses)
        check_opponents(env := make_env(), config.env.opponents)
        records.diagnoses.facts = facts_of(config, env)
        dialect = dialect_of(env, config.rendering)
        algorithm = algorithm_of(config, env)
        filters = filters_of(config.rollout)
        data = RunData.of(config, env, console.line)
        scorer, play = await scoring_of(config, make_env, data.first_task, addresses)
        own = await own_sets(config, data.held_out, addresses)
        source = source_of(config, env, dialect, data, records)
        replay = Replay.of(config, vocab_size=source.vocab_size, on_event=console.line)
        if origin is not None and (prompts := replay or data.source) is not None:
            prompts.check(origin.state.source)
        await check_served(algorithm, config, source)
        source = await ranks_begun(config, source, algorithm, trainers, is_resumed=origin is not None)
        starting = engines_of(config, source, env, records, processes, evaluates=bool(data.held_out))
        engines = await unless_a_rank_ends(trainers, starting)
    renderer = build_renderer(source, dialect, config.rendering)
    world = World(make_env, scorer, renderer, {}, play, expert_layers_of(config, source.config))
    progress, engine = Progress(replace(source, seed=None)), engines[0]
    held_out = HeldOut.of(data, config, world, engines[1] or engine, own)
    run = TrainingRun(
        config=config,
        world=world,
        engine=engine,
        sink=None if engine is None else engine.sink,
        algorithm=algorithm,
        filters=filters,
        trainers=trainers,
        evaluations=Evaluations(config, held_out, *engines, records, progress),
        prompts=data.source and bounded(data.source, config, env, world.renderer),
        records=records,
        progress=progress,
        replay=replay,
        critic_data=CriticData.of(config, source),
    )
    if origin is not None:
        run.states.restore(origin.state)
    return run


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
