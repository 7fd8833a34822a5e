"""A run whose loop is the caller's: the calls behind `agentrl.open_run`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from agentrl.assembly.config import OpenRunConfig
from agentrl.assembly.load import listed_inactive
from agentrl.errors import ConfigError, NoSignalError, UserError
from agentrl.processes.child import print_stacks_on_signal
from agentrl.rollout.cadence import Phases
from agentrl.run import opened_run
from agentrl.run.credit import Credited
from agentrl.run.iterations import Iterations
from agentrl.run.loop import Iteration, IterationTraining, Loop
from agentrl.run.parts import Records
from agentrl.run.resuming import attempt_at, start_of
from agentrl.run.summary import idle_sentence, show_files
from agentrl.runtime.collector import rare_collections
from agentrl.types import JSON, Group
from agentrl.view.console import RunConsole


class _OpenIteration:
    """The iteration in progress: the calls of its run, in the order in which it takes them."""

    def __init__(self, loop: Loop, iterations: Iterations) -> None:
        self._iterations, self._training = iterations, IterationTraining(loop, iterations.progress.step)
        # The frame of the iteration, and in it the turns of engine and trainer.
        self._stack, turns = AsyncExitStack(), AsyncExitStack()
        self._turns, self._phases = turns, Phases(loop.cadence, self._training, turns)
        self._ended: list[Iteration] = []
        self._has_credit = self._is_updated = False

    async def play(self) -> Sequence[Group]:
        self._ended = await self._stack.enter_async_context(self._iterations.iteration())
        await self._stack.enter_async_context(self._turns)
        await self._phases.take()
        return self._training.groups

    def check_credit(self, groups: Sequence[Group]) -> None:
        """Check that `credit` may be called.

        Raises:
            UserError: the batch was trained on, or a group is none of it and has no correction.
        """
        if self._is_updated:
            raise UserError("the batch was trained on: `credit` comes before `update`.")
        training = self._training
        known = {group.id for group in (*training.played, *(kept.group for kept in training.reused))}
        others = [group.id for group in groups if group.id not in known]
        if others and training.loop.algorithm.max_staleness is None:
            raise UserError(
                f"group {others[0]} is not of this batch, and tokens of older weights leave a bias in the "
                "gradient; set max_staleness, and a correction."
            )

    async def credit(self, groups: Sequence[Group]) -> Credited:
        if [*map(id, groups)] != [*map(id, self._training.groups)]:
            await self._training.choose(groups)
        await self._phases.score()
        self._has_credit = True
        return self._training.credited

    def check_update(self) -> None:
        """Check that `update` may be called.

        Raises:
            UserError: the batch was trained on, or has no credit.
        """
        if self._is_updated or not self._has_credit:
            had = "was trained on" if self._is_updated else "has no credit"
            raise UserError(f"the batch {had}: each is `credit`ed, then `update`d once; see ppo_epochs.")

    async def update(self, batch: Credited) -> Mapping[str, float]:
        self._training.credited, self._is_updated = batch, True
        await self._phases.update()
        return self._training.report_metrics

    async def end(self, *, publishes: bool) -> Mapping[str, float]:
        """End it, and record it; its metrics."""
        # The places of a batch that has changed no weights are free at once.
        is_served = publishes or not self._training.has_new_weights
        published = await self._phases.end(self._training.step, publishes=is_served)
        iteration = self._training.iteration(self._phases.times, published)
        self._ended.append(iteration)
        await self._stack.aclose()
        self._iterations.show(iteration)
        return iteration.metrics

    async def fail(self, error: BaseException) -> None:
        """It does not go on: end what it has begun, and record nothing."""
        await self._stack.__aexit__(type(error), error, error.__traceback__)


class OpenRun:
    """A run that plays, trains and publishes when it is told to, by the parts of `agentrl train`.

    An iteration is `play`, `credit`, `update`, `publish`, in this order. It ends with `publish`, or with the
    next `play`, or with the block of the run; then the journal and metrics.jsonl have it. What is left out is
    not done: without `update` nothing is learned, and without `publish`, for which `update_weights_interval`
    has to allow, the engine goes on with the weights that it has. After a call that has failed, there is
    nothing to do but to leave the block.
    """

    def __init__(self, iterations: Iterations) -> None:
        assert isinstance(iterations.loop, Loop), "a run that trains"
        self._loop, self._iterations = iterations.loop, iterations
        self._current: _OpenIteration | None = None
        self._last: Mapping[str, float] = MappingProxyType({})
        self._is_calling = False
        # Iterations that have updated the weights since they were published (count).
        self._num_unpublished = 0

    @property
    def folder(self) -> Path:
        """The folder of the run: its journal, its metrics, and, after the block, its model and its report."""
        return self._iterations.records.folder.path

    @property
    def step(self) -> int:
        """Iterations that have ended, those before it resumed included (count)."""
        return self._iterations.progress.step

    @property
    def is_over(self) -> bool:
        """Whether no iteration is left: all `num_rollout` were played, `max_idle_rollouts` in a row have
        trained on nothing, or the callback of the settings has ended the run."""
        return self._iterations.is_over

    @property
    def version(self) -> int:
        """The policy version that the engine serves."""
        return self._loop.producer.version

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last iteration that has ended, by name, as in metrics.jsonl; {} before it."""
        return self._last

    async def play(self) -> Sequence[Group]:
        """The next batch: complete groups of episodes, each with its verdicts.

        Where `max_staleness` is 0, its groups start now. Above, they have been playing since their places
        were free, and later ones go on while the batch is trained on.

        Raises:
            UserError: no iteration is left; `update_weights_interval` iterations have updated the weights
                since they were published; or the filter keeps too few groups.
            WorldBrokenError: several groups in a row could not be played.
            TokenLawError: a trajectory breaks a token law.
        """
        with self._call():
            await self._end(publishes=False)
            self._check_may_play()
            self._current = _OpenIteration(self._loop, self._iterations)
            return await self._current.play()

    async def credit(self, groups: Sequence[Group]) -> Credited:
        """The credit of the groups that are to be trained on, by the estimator of the settings.

        They are those of `play`, or fewer, or the same with other verdicts, as the journal then says. With
        `max_staleness`, groups of earlier batches may be among them. Nothing is trained on yet.

        Raises:
            UserError: no batch was played; a group is of an earlier one; or the estimator refuses them.
            TokenLawError: a trajectory breaks a token law.
            TrainerError, TeacherError: what scores the tokens has failed.
        """
        current = self._in_progress("credit")
        current.check_credit(groups)
        with self._call():
            return await current.credit(groups)

    async def update(self, batch: Credited) -> Mapping[str, float]:
        """Take the optimizer steps of a batch, in each of `ppo_epochs` passes; the mean of each metric.

        batch: what `credit` returned, or the same with other `steps`.

        Raises:
            UserError: no credit was computed since `play`, or it was trained on already.
            TrainerError: a process of the trainer failed.
        """
        current = self._in_progress("update")
        current.check_update()
        with self._call():
            metrics = await current.update(batch)
        self._num_unpublished += 1
        return metrics

    async def publish(self) -> int:
        """End the iteration, and serve the weights that it has made; the version of those that are served.

        Raises:
            UserError: no batch was played.
            EngineError: the engine rejected the weights.
            TrainerError: a process of the trainer failed.
        """
        self._in_progress("publish")
        with self._call():
            await self._end(publishes=True)
        self._num_unpublished = 0
        return self.version

    async def evaluate(self) -> Mapping[str, float]:
        """Play held-out tasks with the policy that is served; their metrics by name, as in metrics.jsonl.

        Raises:
            UserError: an iteration is in progress; or nothing is held out, or could be measured.
            EngineError: the engine failed.
        """
        self._check_between("evaluate")
        if self._iterations.evaluations.held_out is None:
            raise UserError(
                "this run holds nothing out; set eval_episodes, and eval_split or eval_prompt_data."
            )
        with self._call():
            await self._iterations.evaluate(f"iteration {self.step}")
        return self._iterations.progress.latest

    async def save(self) -> None:
        """Write a checkpoint, from which `open_run` and `agentrl train` resume.

        Raises:
            UserError: an iteration is in progress.
            OSError: it could not be written.
        """
        self._check_between("save")
        with self._call():
            await self._iterations.save()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._current is None:
            return
        if error is None and not self._is_calling:
            await self._end(publishes=False)
        else:
            await self._current.fail(error or UserError("a call of the run has failed."))

    @contextmanager
    def _call(self) -> Iterator[None]:
        """The block of a call. One that raises may leave its iteration where it cannot go on."""
        if self._is_calling:
            raise UserError(
                "a call of this run has failed, or has not returned yet: calls follow each other, and a "
                "failure ends them."
            )
        self._is_calling = True
        yield
        self._is_calling = False

    async def _end(self, *, publishes: bool) -> None:
        """End the iteration in progress, if there is one."""
        if self._current is not None:
            self._last = await self._current.end(publishes=publishes)
            self._current = None

    def _in_progress(self, call: str) -> _OpenIteration:
        if self._current is None:
            raise UserError(f"`{call}` comes after `play`, which returns its batch.")
        return self._current

    def _check_may_play(self) -> None:
        if self.is_over:
            raise UserError(f"no iteration of {self.folder} is left; loop `while not run.is_over`.")
        if self._num_unpublished >= self._iterations.config.rollout.update_weights_interval:
            raise UserError(
                f"the weights of {self._num_unpublished} updates were not published, and tokens of older "
                "ones leave a bias in the gradient; `publish` after each `update`, or set "
                "update_weights_interval, and a correction."
            )

    def _check_between(self, call: str) -> None:
        if self._current is not None:
            raise UserError(f"`{call}` comes between two iterations: after `publish`, or before `play`.")


@asynccontextmanager
async def open_run(
    run: str | Path | None, settings: Mapping[str, JSON], *, resume: bool | int, quiet: bool
) -> AsyncIterator[OpenRun]:
    """The implementation of `agentrl.open_run`.

    Raises:
        ConfigError: as `start_of`; or the run only plays.
    """
    start = start_of(run, settings, resume=resume, kind=OpenRunConfig)
    if start.config.rollout.debug_rollout_only:
        raise ConfigError("debug_rollout_only trains nothing; leave it out, and do without `update`.")
    print_stacks_on_signal()
    console = RunConsole(quiet=quiet)
    with attempt_at(start, console) as begun, rare_collections():
        for line in (*start.config.warnings, *start.warnings):
            console.line(f"Warning: {line}")
        for line in listed_inactive(start.config):
            console.line(line)
        records = Records.opened(start.config, start.folder, console, begun)
        async with opened_run(start.config, records) as opened:
            if records.origin is None and start.config.warm_starts:
                await opened.warm_start()
            async with opened.training() as iterations, OpenRun(iterations) as open_:
                yield open_
        show_files(records)
        if opened.is_idle:
            raise NoSignalError(idle_sentence(opened))
