"""What a run's checkpoints have: taken after each step, written when one is due, restored when it resumes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.assembly.algorithm import Algorithm
from agentrl.data import PromptStream
from agentrl.errors import EngineError, TrainerError
from agentrl.records.history import record_sizes
from agentrl.run.checkpoints import RunState
from agentrl.run.colocation import Colocation
from agentrl.run.evaluations import Evaluations
from agentrl.run.journal_entries import leftover_entries
from agentrl.run.loop import Loop, PlayLoop
from agentrl.run.parts import Progress, Records
from agentrl.run.replay import Replay

AnyLoop: TypeAlias = Loop | PlayLoop
Prompts: TypeAlias = PromptStream | Replay
"""The place in the prompts of a run, which its checkpoints keep."""


@dataclass(frozen=True, slots=True)
class RunStates:
    """The state of a run between two steps. `progress.state` is the last one that was taken.

    algorithm: None = a run that only plays. idle_limit: iterations that train on nothing until the run ends
    (count; 0 = any number).
    """

    records: Records
    progress: Progress
    evaluations: Evaluations
    algorithm: Algorithm | None
    idle_limit: int

    @property
    def is_idle(self) -> bool:
        """Whether so many iterations in a row have trained on nothing, unsolved, that the run ends."""
        return self.algorithm is not None and 0 < self.idle_limit <= self.progress.idle_rollouts

    async def take(self, loop: AnyLoop, prompts: Prompts) -> RunState:
        """Take the state, once the journal has all that is before it."""
        records, progress = self.records, self.progress
        await records.journal.flush()
        pending = (*loop.producer.pending, *prompts.pending)
        progress.state = RunState(
            attempt=records.attempt,
            step=progress.step,
            version=loop.version,
            source=prompts.fingerprint,
            next_ordinal=prompts.next_ordinal,
            pending=pending,
            skipped=dict(prompts.skipped),
            elapsed_s=records.metrics.elapsed_s,
            records=record_sizes(records.folder.path),
            milestones=tuple(milestone.saved() for milestone in progress.milestones),
            latest=progress.latest,
            scores=self.evaluations.scores,
            due_evaluations=self.evaluations.due,
            evaluating=self.evaluations.step,
            stages=records.watch.stages,
            data_buffer=() if loop.data_buffer is None else loop.data_buffer.saved,
            data_source=prompts.source_state(pending),
            # A run that is resumed after this end goes on for as long again.
            idle_rollouts=0 if self.is_idle else progress.idle_rollouts,
            controls={} if self.algorithm is None else self.algorithm.controls.state(),
        )
        return progress.state

    def restore(self, state: RunState) -> None:
        """Be as far as the checkpoint; its evaluations are read from the journal."""
        progress = self.progress
        progress.step = progress.saved_step = state.step
        progress.latest = dict(state.latest)
        progress.idle_rollouts = state.idle_rollouts
        if self.algorithm is not None:
            self.algorithm.controls.restore(state.controls)
        self.evaluations.restore(state)

    async def save(self, colocation: Colocation) -> None:
        """Write a checkpoint of the last finished step, unless it has one."""
        progress = self.progress
        if progress.state is None or progress.saved_step == progress.state.step:
            return
        async with colocation.saving():
            await self.records.checkpoints.save(progress.trainer, progress.state, self.records.groups)
        progress.saved_step = progress.state.step

    async def stop(self, loop: AnyLoop) -> None:
        """Keep what was finished: as a checkpoint, unless some of the next step was trained already.

        Groups that were played go on when the run resumes. Until then, the journal has them as dropped.
        """
        stopped, left = await loop.producer.stop(), await loop.producer.close()
        if entries := [*leftover_entries(left, loop.in_progress)]:
            await self.records.journal.write_step(self.progress.step + 1, entries)
        if loop.in_progress.trained:
            return
        with suppress(TrainerError, EngineError):  # one that has died is what stopped the run
            await self.save(loop.colocation)
            if self.records.groups is not None and self.progress.state is not None:
                ended = (*loop.in_progress.outcomes, *left)
                await self.records.checkpoints.save_groups(self.progress.step, ended, stopped)
