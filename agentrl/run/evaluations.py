"""The held-out evaluations of a run: when each begins, which weights it scores, where its result belongs.

A row of the table (before, after warm start, after RL) is awaited. So is each between two iterations, unless
`RunConfig.evaluates_beside`: then it is a task, and the loop goes on. Its result is of the iteration after
which it began, and is recorded between two later iterations, so that every checkpoint has all of it or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.assembly.config import RunConfig
from agentrl.run.checkpoints import RunState
from agentrl.run.held_out import Evaluated, HeldOut, eval_metrics, version_metrics
from agentrl.run.parts import Milestone, Progress, Records, World
from agentrl.types.seams import Engine

EVALUATION = "evaluation"
_UNTRAINED_EPISODES = 32


@dataclass(frozen=True, slots=True)
class _Started:
    """An evaluation beside the training.

    step: after which it began. due: the iterations after which it, and those in whose place it is, were due.
    held_out: what it plays.
    """

    name: str
    step: int
    due: tuple[int, ...]
    held_out: HeldOut
    task: asyncio.Task[Evaluated]

    def may_have(self, metric: str | None) -> bool:
        """Whether it may measure this; None = nothing does."""
        # A function may measure anything.
        names = self.held_out.sets if self.held_out.function is None else ("",)
        return metric is not None and any(metric.startswith(f"eval/{n}/" if n else "eval/") for n in names)


@dataclass(slots=True)
class Evaluations:
    """Plays the evaluations of a run, one at a time.

    Between two iterations only the sets are played that are due. One that is due while another plays waits
    for its end, and then begins after the next iteration, with the weights of then. If a further one becomes
    due meanwhile, the waiting one is in its place, too, with the sets of both, which `perf/eval_replaced`
    counts.

    consumes: evaluations that are due. waits for: episodes; the loop waits for them in `evaluate` and
    `finish`. unblocked by: the ends of episodes. on shutdown: `drop` cancels the one that plays.

    held_out: None = nothing is held out, and no call does anything. policy: the engine of training. engine:
    one of evaluations alone; it gets the weights that an evaluation scores when that begins, and no others
    until it has ended. None = they share the policy's. waiting: the iterations after which one was due that
    has not begun.
    """

    config: RunConfig
    held_out: HeldOut | None
    policy: Engine | None
    engine: Engine | None
    records: Records
    progress: Progress
    waiting: list[int] = field(default_factory=list)
    _started: _Started | None = None

    def against(self, world: World) -> Evaluations:
        """The same evaluations in another world. Before the first of them."""
        return replace(self, held_out=self.held_out and replace(self.held_out, world=world))

    @property
    def due(self) -> tuple[int, ...]:
        """The iterations after which an evaluation was due whose result is not recorded."""
        return (*(() if self._started is None else self._started.due), *self.waiting)

    @property
    def step(self) -> int | None:
        """The iteration whose weights are being evaluated; None = no evaluation plays."""
        return None if self._started is None else self._started.step

    @property
    def scores(self) -> dict[int, float]:
        """`best_metric` of the evaluated weights, by iteration."""
        best = self.config.best_metric
        if best is None:
            return {}
        milestones = self.progress.milestones
        values = {m.step: {**eval_metrics(m.evaluations), **m.own}.get(best) for m in milestones}
        return {step: value for step, value in values.items() if value is not None}

    def may_be_best(self, step: int) -> bool:
        """Whether the weights of an iteration have scored better than all before, or are being evaluated."""
        scores = self.scores
        is_best = bool(scores) and max(scores, key=scores.__getitem__) == step
        started, best = self._started, self.config.best_metric
        return is_best or (started is not None and started.step == step and started.may_have(best))

    async def evaluate(self, name: str) -> None:
        """Score the policy on all held-out tasks, sampled and greedily; log and journal it.

        What waits to begin is replaced by it.

        Raises:
            UserError: nothing could be measured.
            EngineError: the engine failed, or rejected the weights.
        """
        if self.held_out is not None:
            await self._evaluate(self.held_out, name, in_table=True)

    async def _evaluate(self, held_out: HeldOut, name: str, *, in_table: bool) -> None:
        most, step = self._most_prompts, self.progress.step
        with self.records.watch.stage(EVALUATION, held_out.num_episodes(most)):
            await self._send_weights()
            evaluated = await held_out.evaluations(step, most)
            milestone = await _journalled(self.records, name, step, evaluated, in_table=in_table)
        due, self.waiting = tuple(self.waiting), []
        # It was not due itself, so that it is in the place of all that were.
        self._record(milestone, {"delay": float(step - due[-1]) if due else 0.0, "replaced": float(len(due))})

    async def after(self, step: int, *, has_new_weights: bool) -> bool:
        """Record what has ended, and begin what is due after an iteration, unless the run has it already.

        has_new_weights: the trainer's weights are not published yet; an engine of evaluations alone waits
        until they are, since no version is theirs. Returns whether anything has changed.

        Raises:
            UserError: the evaluation that has ended measured nothing.
            EngineError: its engine failed, or rejected the weights.
        """
        if self.held_out is None:
            return False
        name = f"iteration {step}"
        is_known = step in self.due or any(milestone.name == name for milestone in self.progress.milestones)
        is_due = self.held_out.is_due(step) and not is_known
        if is_due:
            self.waiting.append(step)
        due = self.held_out.due_after(*self.waiting)
        if not self.config.evaluates_beside:
            # One waits also where training did not in an earlier attempt.
            is_due = bool(self.waiting)
            self.waiting = [waiting for waiting in self.waiting if waiting != step]
            if is_due:
                await self._evaluate(due, name, in_table=False)
            return is_due
        has_ended = self._started is not None and self._started.task.done()
        if has_ended:
            await self._collect()
        has_version = self.engine is None or not has_new_weights
        begins = bool(self.waiting) and self._started is None and has_version
        if begins:
            await self._send_weights()
            task = asyncio.create_task(due.evaluations(step, self._most_prompts))
            self._started, self.waiting = _Started(name, step, tuple(self.waiting), due, task), []
        return is_due or has_ended or begins

    async def finish(self) -> bool:
        """Wait for the evaluation that plays, and record it; returns whether there was one.

        Raises:
            UserError: it measured nothing.
            EngineError: its engine failed.
        """
        if self._started is None:
            return False
        # Its episodes were played beside the training, not in this stage.
        with self.records.watch.stage(EVALUATION, 0):
            await asyncio.wait([self._started.task])
        await self._collect()
        return True

    async def drop(self) -> None:
        """Cancel the evaluation that plays; its episodes are closed."""
        started, self._started = self._started, None
        if started is None:
            return
        started.task.cancel()
        await asyncio.gather(started.task, return_exceptions=True)
        self.records.console.line(
            f"The evaluation after {started.name} was dropped; it is played again when the run resumes."
        )

    async def close(self) -> None:
        """Close the engine of evaluations alone."""
        if self.engine is not None:
            await self.engine.close()

    def restore(self, state: RunState) -> None:
        """Be as far as a checkpoint: its evaluations are read from the journal, what was due is due.

        Raises:
            OSError, ValueError: the journal lacks one of them.
        """
        if self.held_out is None:
            return
        folder = self.records.folder.path
        self.waiting = [*state.due_evaluations]
        for saved in state.milestones:
            journal = {mode: folder / name for mode, name in saved.files.items()}
            evaluations = self.held_out.restored(journal, saved.seconds)
            parts = (saved.name, saved.step, saved.in_table, evaluations, saved.files, saved.own)
            milestone = Milestone(*parts)
            self.progress.milestones.append(milestone)

    @property
    def _most_prompts(self) -> int | None:
        """Most prompts of each set (count): few for a model that nothing has trained."""
        is_untrained = self.progress.trainer is None and self.config.model.hf_checkpoint is None
        return _UNTRAINED_EPISODES if is_untrained else None

    async def _send_weights(self) -> None:
        """Send the trainer's weights to the engine of evaluations; without a trainer it has opened them."""
        trainer = self.progress.trainer
        if self.engine is not None and self.policy is not None and trainer is not None:
            await trainer.publish(self.engine.sink, version=self.policy.version)

    async def _collect(self) -> None:
        """Record the evaluation that has ended."""
        started, self._started = self._started, None
        assert started is not None, "an evaluation has ended"
        evaluated = started.task.result()
        milestone = await _journalled(self.records, started.name, started.step, evaluated, in_table=False)
        delay, replaced = started.step - started.due[-1], len(started.due) - 1
        self._record(milestone, {"delay": float(delay), "replaced": float(replaced)})

    def _record(self, milestone: Milestone, beside: Mapping[str, float]) -> None:
        """Log a milestone. beside: what is measured of an evaluation beside training."""
        progress, evaluations = self.progress, milestone.evaluations
        progress.milestones.append(milestone)
        metrics = {**eval_metrics(evaluations), **milestone.own}
        if self.config.evaluates_beside:
            metrics |= version_metrics(evaluations)
        # The shares of versions that this one did not have are no part of it.
        earlier = {n: value for n, value in progress.latest.items() if "/version_share/" not in n}
        progress.latest = earlier | metrics
        if self.config.evaluates_beside:
            metrics = {**metrics, **{f"perf/eval_{name}": value for name, value in beside.items()}}
        self.records.log(milestone.step, metrics)


async def _journalled(
    records: Records, name: str, step: int, evaluated: Evaluated, *, in_table: bool
) -> Milestone:
    """The milestone of an evaluation, whose episodes are in the journal."""
    journal, files = records.journal, dict[str, str]()
    for key, evaluation in evaluated.parts.items():
        # The name too: before and after a warm start are both step 0.
        path = await journal.write_eval(f"{key} {name}", step, evaluation.entries())
        files[key] = str(path.relative_to(records.folder.path))
    return Milestone(name, step, in_table, evaluated.parts, files, evaluated.own)


def shown(progress: Progress) -> dict[str, str]:
    """The mean scores of the last evaluation, by set and mode, and of which weights they are."""
    if not progress.milestones:
        return {}
    last = progress.milestones[-1]
    text = ", ".join(f"{evaluation.report.mean:.3f} {key}" for key, evaluation in last.evaluations.items())
    return {"held-out": f"{text} (step {last.step})"}
