"""One run, stage by stage: build the world, warm start, RL; evaluations in between."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.laws import TokenLaws
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.places import peak_of_ranks
from agentrl.assembly.rollout import Filters, build_producer
from agentrl.assembly.trainer import TrainerFactory
from agentrl.data import DataSource, PromptStream
from agentrl.envs.opponents import Opponent
from agentrl.rollout.cadence import Publishing, moving_reference
from agentrl.rollout.player import Player
from agentrl.rollout.players.players import Players
from agentrl.rollout.producer import Rollouts
from agentrl.run.colocation import Colocation
from agentrl.run.data_buffer import DataBuffer
from agentrl.run.evaluations import Evaluations
from agentrl.run.iterations import RL, ROLLOUT, Iterations
from agentrl.run.journal_entries import groups_of_step
from agentrl.run.loop import Loop, PlayLoop
from agentrl.run.parts import (
    Progress,
    Records,
    World,
    player_of,
)
from agentrl.run.pretraining import CriticData, pretrain_critic
from agentrl.run.recording import StepRecorder
from agentrl.run.replay import Replay
from agentrl.run.stages import LagMeter
from agentrl.run.states import AnyLoop, Prompts, RunStates
from agentrl.run.warm_start import warm_started
from agentrl.types.seams import Engine, Trainer, WeightSink
from agentrl.weights.hf.source import Operations


# The models of a run that ends: the last one, and the one that scored best, where the last one is worse.
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


BUILD, TRAINER = "building the world", "starting the trainer"


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The stages of a run, over parts that do not change; only `progress` does.

    engine: None = a replay, which plays nothing. sink: of new weights: the engine's own, unless it was
    replaced. algorithm: None = a run that only plays. prompts: None = a run without RL. replay: the batches
    of a journal, None = they are played. players: None = this process plays.
    """

    config: RunConfig
    world: World
    engine: Engine | None
    sink: WeightSink | None
    algorithm: Algorithm | None
    filters: Filters
    trainers: TrainerFactory
    evaluations: Evaluations
    prompts: DataSource | None
    records: Records
    progress: Progress
    replay: Replay | None = None
    critic_data: CriticData | None = None
    players: Players | None = None

    @property
    def is_idle(self) -> bool:
        """Whether so many iterations in a row have trained on nothing, unsolved, that the run ends."""
        return self.states.is_idle

    @property
    def states(self) -> RunStates:
        """What its checkpoints have."""
        idle_limit = self.config.rollout.idle_limit
        return RunStates(self.records, self.progress, self.evaluations, self.algorithm, idle_limit)

    def against(self, opponents: Mapping[str, Opponent]) -> TrainingRun:
        """The same run, in which these play the agents that are not trained."""
        world = replace(self.world, opponents=opponents)
        return replace(self, world=world, evaluations=self.evaluations.against(world))

    async def close(self) -> None:
        """Stop the engine, save the current weights, close the logs.

        Raises:
            DiskError: the journal could not be written.
            OSError: the weights could not be written.
        """
        async with AsyncExitStack() as ending:
            # The last is called first, and what one raises keeps no other from its call.
            ending.push_async_callback(self.records.journal.close)
            ending.callback(self.records.metrics.close)
            if self.progress.trainer is not None:
                parts = self.records, self.evaluations.scores, self.config
                ending.push_async_callback(save_models, self.progress.trainer, *parts)
            ending.push_async_callback(self.records.checkpoints.written)
            if self.engine is not None:
                ending.push_async_callback(self.engine.close)
            ending.push_async_callback(self.evaluations.close)

    async def warm_start(self) -> None:
        """Imitate demonstrations, save the result in a folder of its own, and publish it."""
        trainer = await warm_started(self.config, self.world, self.records, self.trainers, self.progress)
        if self.sink is not None:
            await trainer.publish(self.sink, version=0)

    async def reinforce(self) -> None:
        """The RL iterations, with batches that are played, or those of a journal."""
        async with self.training() as iterations:
            await iterations.run()

    async def record(self) -> None:
        """The iterations of a run that only plays: the policy stays as it is."""
        producer, prompts = _rollouts(self, Colocation())
        async with self._iterations(
            PlayLoop(producer, functions=self.filters.batch), None, prompts
        ) as iterations:
            await iterations.run()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[Iterations]:
        """The RL iterations, for whoever calls for them; the trainer starts with the block."""
        config, progress, origin = self.config, self.progress, self.records.origin
        assert self.algorithm is not None, "a run that trains has an algorithm"
        colocation = Colocation.of(config.trainer, self.engine, self.sink)
        async with colocation.starting(0 if origin is None else origin.state.version):
            with self.records.console.stage(TRAINER, 1) as bar, self.records.monitor.starting(bar):
                trainer = await self.trainers.reinforcement(progress.source, self.algorithm.loss)
            progress.trainer = colocation.trainer = trainer
            if (kernels := await trainer.kernels()) is not None:
                self.records.console.line(kernels)
            if origin is not None:
                await trainer.load_state(origin.trainer)
        if origin is None and self.critic_data is not None:
            await pretrain_critic(self.critic_data, trainer, self.algorithm, self.records)
        producer, prompts = _rollouts(self, colocation)
        loop = Loop(
            producer=producer,
            trainer=trainer,
            algorithm=self.algorithm,
            sink=self.sink,
            num_steps=config.rollout.num_steps_per_rollout,
            num_epochs=config.algorithm.ppo_epochs,
            watch=CorrectionWatch(config.algorithm.watched_correction),
            laws=TokenLaws(progress.source.vocab_size),
            functions=self.filters.batch,
            publishing=Publishing.of(config.rollout),
            overlaps=config.rollout.is_async,
            colocation=colocation,
            moving=moving_reference(config.algorithm),
            data_buffer=DataBuffer.of(config.rollout, self.filters.reused),
            operations=Operations.of(progress.source.config) if config.trainer.all_learn else None,
            ranks=config.layout.world_size,
            peak=peak_of_ranks(config),
            resets_optimizer=config.trainer.reset_optimizer_states,
        )
        if origin is not None and loop.data_buffer is not None:
            groups_of = partial(groups_of_step, self.records.folder.path)
            await asyncio.to_thread(loop.data_buffer.restore, origin.state.data_buffer, groups_of)
        recorder = StepRecorder(config.observe, trainer, self.records.folder.path, self.records.console.line)
        async with self._iterations(loop, recorder, prompts) as iterations:
            yield iterations

    @asynccontextmanager
    async def _iterations(
        self, loop: AnyLoop, recorder: StepRecorder | None, prompts: Prompts
    ) -> AsyncIterator[Iterations]:
        """Those of a loop; its producer is closed however they end, and what was finished is kept."""
        records, progress, states = self.records, self.progress, self.states
        await states.take(loop, prompts)
        if records.origin is None and self.config.warm_starts:
            await states.save(loop.colocation)
        number = self.config.rollout.num_rollout
        if self.replay is not None:
            number = min(number, self.replay.num_steps)
        title = ROLLOUT if isinstance(loop, PlayLoop) else RL
        try:
            async with LagMeter() as lag:
                with records.console.stage(title, number) as bar, records.monitor.iterations(loop, bar):
                    bar.advance(progress.step)
                    yield Iterations(
                        *(self.config, loop, prompts, recorder, records, progress, self.evaluations),
                        *(states, self.engine, number, lag, bar),
                    )
            if await self.evaluations.finish():
                await states.take(loop, prompts)
        finally:
            await self.evaluations.drop()
            await states.stop(loop)


def _rollouts(run: TrainingRun, colocation: Colocation) -> tuple[Rollouts, Prompts]:
    """The batches from the next step on, and the place in their prompts."""
    origin = run.records.origin
    ordinal, version = (0, 0) if origin is None else (origin.state.next_ordinal, origin.state.version)
    if run.replay is not None:
        run.replay.resume(run.progress.step, version=version, next_ordinal=ordinal)
        return run.replay, run.replay
    assert run.prompts is not None, "a run with RL has prompts"
    stream = PromptStream(run.prompts, ordinal)
    if origin is not None:
        stream.resume(origin.state.pending, origin.state.skipped)
        run.prompts.restore(origin.state.data_source)
    assert run.engine is not None, "a run that plays has an engine"
    rollout, records, step = run.config.rollout, run.records, run.progress.step
    player = player_of(run.config, run.world, run.engine, run.filters, colocation.absence)
    player = replace(player, note=records.note)
    groups: Player = player if run.players is None else run.players.in_place_of(player)
    producer = build_producer(
        rollout, stream.next, groups, run.filters, num_batches=rollout.num_rollout - step
    )
    producer.resume(version=version, saved=records.resumed_groups())
    return producer, stream
