"""The iterations of a run: what each leaves in its records, what is due between two, how they stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from agentrl.assembly.config import RunConfig
from agentrl.engine.sglang.fleet import Fleet
from agentrl.errors import EngineError, StageError, UserError
from agentrl.rollout.batch_functions import BatchFunctions
from agentrl.run.drift import drift_metrics
from agentrl.run.evaluations import Evaluations, shown
from agentrl.run.journal_entries import iteration_entries
from agentrl.run.loop import Iteration, PlayLoop
from agentrl.run.metrics import RAW_REWARD, engine_metrics, skipped_metrics
from agentrl.run.parts import Progress, Records
from agentrl.run.recording import StepRecorder, recorded
from agentrl.run.stages import LagMeter
from agentrl.run.states import AnyLoop, Prompts, RunStates
from agentrl.runtime.event_loop import to_its_end
from agentrl.runtime.stage import stage
from agentrl.types import Group
from agentrl.types.seams import Engine
from agentrl.view.console import StageBar

RL, ROLLOUT = "RL", "rollout"
_PROFILED = 200
_FINISHING = "Stopping after the step that is being trained; interrupt again to stop at once."


@dataclass(frozen=True, slots=True)
class Iterations:
    """The iterations of a loop; `run` has them all, `iteration` is the frame of a single one.

    number: of iterations until the run ends (count). recorder: of single steps; None = no trainer is there to
    be recorded. engine: whose events count; None = nothing plays. counted: those so far.
    """

    config: RunConfig
    loop: AnyLoop
    prompts: Prompts
    recorder: StepRecorder | None
    records: Records
    progress: Progress
    evaluations: Evaluations
    states: RunStates
    engine: Engine | None
    number: int
    lag: LagMeter
    bar: StageBar
    counted: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Those that are left, with what is due between them."""
        if self.progress.step:
            await self._between()
        while self.progress.step < self.number and not self.records.are_enough:
            iteration, is_cancelled = await to_its_end(
                self._iterate(),
                # The weights have changed, or the journal has some of the step.
                lambda: self.loop.in_progress.is_training or self.progress.state is None,
                partial(self.records.console.line, _FINISHING),
            )
            if is_cancelled:
                raise asyncio.CancelledError
            is_over = self.is_over
            if not is_over:
                await self._between()
            self.show(iteration)
            if is_over:
                break

    @property
    def is_over(self) -> bool:
        """Whether none is left: all were played, none gives a signal, or the callback has ended the run."""
        is_last = self.progress.step >= self.number
        return is_last or self.states.is_idle or self.records.are_enough

    @asynccontextmanager
    async def iteration(self) -> AsyncIterator[list[Iteration]]:
        """The block of the next iteration, which appends it; afterwards the journal and the metrics have it.

        Of a block that raises, nothing is recorded here.
        """
        monitor, ended = self.records.monitor, list[Iteration]()
        if self.config.observe.profile_engine_step == self.progress.step + 1:
            await self._profile_engine()
        self.lag.take()
        monitor.begin()
        with self.records.watch.stage(ROLLOUT if isinstance(self.loop, PlayLoop) else RL):
            async with recorded(self.recorder, self.progress.step + 1) as phases:
                yield ended
                [iteration] = ended
                phases.extend(iteration.phases)
            metrics = iteration.metrics
            metrics["perf/event_loop_lag_max"] = self.lag.take()
            metrics.update(skipped_metrics(self.prompts.take_skipped()))
            metrics.update(monitor.end((*iteration.trained, *iteration.dropped)))
            seed = f"drift/{self.config.run.seed}/{iteration.step}"
            metrics.update(drift_metrics(iteration.outcomes, self.progress.source, seed=seed))
            if self.loop.functions is not None:
                metrics.update(await self._own_metrics(iteration, self.loop.functions))
            self.progress.state = None  # until the journal has this step, no checkpoint may say that it has
            await self._record(iteration)
        await self._adapt(_played(iteration))
        self.records.forget(await self.states.take(self.loop, self.prompts))

    def show(self, iteration: Iteration) -> None:
        """Show on the bar that one more has ended."""
        names = {"reward": "rollout/raw_reward", "tok/s": "perf/rollout_tok_per_s"}
        figures = {short: iteration.metrics[name] for short, name in names.items()}
        self.bar.advance(1, **figures, **shown(self.progress))

    async def evaluate(self, name: str) -> None:
        """Score the policy on held-out tasks, between two iterations.

        Raises:
            UserError: nothing could be measured.
            EngineError: the engine failed, or rejected the weights.
        """
        await self.evaluations.evaluate(name)
        await self.states.take(self.loop, self.prompts)

    async def save(self) -> None:
        """Write a checkpoint of the last finished step, unless it has one."""
        await self.states.save(self.loop.colocation)

    async def _profile_engine(self) -> None:
        """Have the servers trace what they do next; where they cannot, the run goes on."""
        folder, line = self.records.folder.path.resolve() / "profile" / "engine", self.records.console.line
        try:
            if isinstance(self.engine, Fleet):
                await self.engine.profile(folder, _PROFILED)
                line(f"The servers trace {_PROFILED} forward passes into {folder}.")
        except EngineError as error:
            line(f"Warning: the servers trace nothing ({error}); the run goes on.")

    async def _iterate(self) -> Iteration:
        async with self.iteration() as ended:
            ended.append(await self.loop.iterate(self.progress.step))
        return ended[0]

    async def _between(self) -> None:
        """What is due after a step but the last: an evaluation, and a checkpoint."""
        step, has_new_weights = self.progress.step, self.loop.in_progress.has_new_weights
        if await self.evaluations.after(step, has_new_weights=has_new_weights):
            await self.states.take(self.loop, self.prompts)
        if step % self.config.checkpoint.save_interval == 0 or self.evaluations.may_be_best(step):
            await self.save()

    async def _adapt(self, groups: Sequence[Group]) -> None:
        """The source of prompts hears of the groups: its next prompts may depend on them.

        Raises:
            UserError: it failed.
        """
        try:
            async with stage("data", None):
                self.prompts.add_groups(groups)
        except StageError as error:
            raise UserError(f"the source of prompts failed ({error.detail}); mend it.") from error

    async def _own_metrics(self, iteration: Iteration, functions: BatchFunctions) -> dict[str, float]:
        """Those of a function of the user; where it fails, none: a run is worth more."""
        step, groups = iteration.step + 1, _played(iteration)
        try:
            return await functions.metrics(step, groups, iteration.metrics)
        except UserError as error:
            self.records.console.line(f"Warning: {error}")
            return {}

    async def _record(self, iteration: Iteration) -> None:
        records, step = self.records, iteration.step + 1
        self.progress.step = step
        is_solved = records.diagnoses.facts.is_solved(iteration.metrics[RAW_REWARD])
        self.progress.idle_rollouts = 0 if iteration.trained or is_solved else self.progress.idle_rollouts + 1
        for warning in iteration.warnings:
            records.console.line(f"Warning: {warning}")
        await records.journal.write_step(step, iteration_entries(iteration))
        counts = {} if self.engine is None else self.engine.counts
        records.log(step, iteration.metrics | engine_metrics(counts, self.counted))
        self.counted.update(counts)


def _played(iteration: Iteration) -> list[Group]:
    """The complete groups of an iteration, dropped ones too, in the order of their prompts."""
    return [outcome.group for outcome in iteration.outcomes if outcome.group is not None]
