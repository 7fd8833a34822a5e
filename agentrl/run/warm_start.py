"""The warm start: imitation of what the environment's own script plays, before RL."""

from __future__ import annotations

from dataclasses import replace

from agentrl.assembly.config import RunConfig
from agentrl.assembly.trainer import TrainerFactory
from agentrl.envs import tasks_of
from agentrl.run.demonstrations import demonstrate
from agentrl.run.imitation import imitate, shuffled_batches
from agentrl.run.parts import Progress, Records, World
from agentrl.types import Sample
from agentrl.types.seams import Trainer

DEMONSTRATIONS, WARM_START = "demonstrations", "warm start"


async def warm_started(
    config: RunConfig, world: World, records: Records, trainers: TrainerFactory, progress: Progress
) -> Trainer:
    """The trainer after the warm start; the model in a folder of its own is the run's from then on.

    An earlier attempt that had come so far has left that folder: its weights are loaded. The trainer is the
    run's as soon as it is there, so that a run that is stopped meanwhile leaves its model.

    Raises:
        UserError: the environment has no demonstrator.
        WorldBrokenError: a demonstration failed, or none was completed.
        TrainerError: a process of the trainer failed.
    """
    source, done = progress.source, replace(progress.source, directory=records.folder.warm_start)
    if records.folder.warm_start.exists():
        records.console.line(f"The warm start is that of an earlier attempt ({records.folder.warm_start}).")
        progress.trainer, progress.source = await trainers.warm_start(done), done
        return progress.trainer
    samples = await _demonstrated(config, world, records)
    trainer = progress.trainer = await trainers.warm_start(source)
    section, seed = config.warm_start, config.run.seed
    size, steps = section.warm_start_batch_size, section.warm_start_steps
    order = shuffled_batches(len(samples), size, seed=seed, total=steps * size)
    batches = ([samples[index] for index in indices] for indices in order)
    with records.watch.stage(WARM_START, steps), records.console.stage(WARM_START, steps) as bar:
        async for report in imitate(trainer, batches):
            bar.advance(1, loss=report.metrics["train/loss"])
    await trainer.save(str(records.folder.warm_start))
    progress.source = done
    return trainer


async def _demonstrated(config: RunConfig, world: World, records: Records) -> list[Sample]:
    section, seed = config.warm_start, config.run.seed
    number, console = section.demonstrations, records.console
    with records.watch.stage(DEMONSTRATIONS, number), console.stage(DEMONSTRATIONS, number) as bar:
        tasks = tasks_of(world.make_env(), section.warm_start_split)
        return await demonstrate(
            world.make_env, world.renderer, tasks, number, seed=seed, progress=bar.advance
        )
