"""The credit of a rollout batch: its scores, a teacher's too, its advantages, its split into optimizer steps.

Where a batch takes one optimizer step and nothing needs the proximal logprobs before it, they are those that
this step computes. Then the credit is complete after the step: its metrics, and the advantages with their
correction, are computed from what the step returns, by the same code as before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.conversion import post_processed_data
from agentrl.algorithms.corrections import FactorsInStep
from agentrl.algorithms.off_policy import mismatch_by_depth, mismatch_by_staleness, mismatch_metrics
from agentrl.algorithms.steps import OptimizerStep, RolloutBatch
from agentrl.algorithms.tokens import TokenScores
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.errors import UserError
from agentrl.rollout.batch_functions import called
from agentrl.types import FloatArray, ProximalInStep, RolloutId, Sample, Scores
from agentrl.types.seams import StepReport, Teacher, Trainer
from agentrl.weights.hf.source import ModelSource


class Credited(NamedTuple):
    """A batch split into optimizer steps, the metrics of its credit, and the advantages by rollout.

    scores: of the samples of its tokens. is_open: they lack the proximal logprobs, and the credit its
    correction, its metrics and its advantages, until its one step is done.
    """

    steps: Sequence[OptimizerStep]
    scores: Scores
    metrics: dict[str, float]
    advantages: Mapping[RolloutId, FloatArray]
    is_open: bool = False

    @property
    def trained(self) -> set[str]:
        """The ids of the groups that have a gradient."""
        return {group.id for step in self.steps for group in step.groups}


NO_CREDIT = Credited((), Scores(()), {}, {})
"""That of a batch without tokens."""


@dataclass(frozen=True, slots=True)
class Crediting:
    """What computes the credit. num_steps: most optimizer steps of a pass over a batch (count). is_one_step:
    there is one pass of one step, in which the policy learns."""

    trainer: Trainer
    algorithm: Algorithm
    num_steps: int
    is_one_step: bool
    clock: Callable[[], float] = time.perf_counter

    async def before(self, batch: RolloutBatch) -> Credited:
        """The credit before the first optimizer step.

        Raises:
            UserError: the estimator refuses the batch, or a function of the user's failed.
            TeacherError: a server of the teacher has failed.
        """
        if not batch.tokens.samples:
            return NO_CREDIT
        estimator = self._estimator_in_step(batch)
        scoring = self._scores(batch, in_step=estimator is not None)
        if estimator is None:
            teacher, samples = self.algorithm.teacher, batch.tokens.samples
            scores, teaching = await taught(teacher, samples, self.trainer, scoring, self.clock)
            credited = self._complete(await self._post_processed(batch, scores), scores)
            return credited._replace(metrics=credited.metrics | teaching)
        scores = await scoring
        correction = self.algorithm.correction
        factors = None if correction is None else FactorsInStep(correction)
        leaves_out = correction is not None and self.algorithm.policy_term_only
        _, advantages = self._advantages(batch, scores, estimator)
        in_step = ProximalInStep(factors, leaves_out)
        steps = [
            step._replace(batch=replace(step.batch, in_step=in_step))
            for step in self._steps(batch, scores, advantages)
        ]
        scores = await self._with_the_rest(batch, scores, steps)
        return Credited(steps, scores, {}, {}, is_open=True) if steps else self._complete(batch, scores)

    def after(self, batch: RolloutBatch, credited: Credited, reports: Sequence[StepReport]) -> Credited:
        """The complete credit. reports: of all optimizer steps.

        Raises:
            UserError: the logprobs of a step are not finite.
        """
        if not credited.is_open:
            return credited
        proximal = list(credited.scores.proximal)
        for step, report in zip(credited.steps, reports, strict=True):
            assert report.logprobs is not None, "a trainer returns the logprobs that it took as proximal"
            for index, logprobs in zip(step.indices, report.logprobs, strict=True):
                proximal[index] = logprobs
        return self._complete(batch, replace(credited.scores, proximal=tuple(proximal)))

    async def _post_processed(self, batch: RolloutBatch, scores: Scores) -> RolloutBatch:
        """The batch with the samples that a function of the user makes of those that were scored.

        Raises:
            UserError: the function failed.
        """
        function, samples = self.algorithm.post_process, batch.tokens.samples
        if function is None:
            return batch
        # No group is idle then: all samples have scores.
        return batch.with_samples(
            await called("post-processing of data", lambda: post_processed_data(function, samples, scores))
        )

    def _estimator_in_step(self, batch: RolloutBatch) -> AdvantageEstimator | None:
        """The estimator without its correction, where the one step of the batch computes that."""
        correction = self.algorithm.correction
        # The trainer may put the samples of a rollout into different micro-batches.
        is_whole = correction is None or correction.of_tokens is not None or not batch.splits_rollouts
        return self.algorithm.uncorrected if self.is_one_step and is_whole else None

    def _complete(self, batch: RolloutBatch, scores: Scores) -> Credited:
        """The credit where all scores are there."""
        algorithm, tokens = self.algorithm, batch.tokens
        token_scores, advantages = self._advantages(batch, scores, algorithm.estimator)
        steps = self._steps(batch, scores, advantages)
        metrics = {**advantages.metrics, **algorithm.controls.metrics, **_spread(advantages)}
        if "old" in algorithm.roles:
            metrics |= mismatch_metrics(tokens, token_scores) | mismatch_by_depth(tokens, token_scores)
        if algorithm.max_staleness is not None:
            proximal = token_scores if "old" in algorithm.roles else None
            metrics |= mismatch_by_staleness(
                tokens, proximal, advantages.clipped_N, max_staleness=algorithm.max_staleness
            )
        if algorithm.masks_older:
            metrics["mask_offpolicy_fraction"] = 1.0 - tokens.mean(tokens.is_newest().astype(float))
        logged = {f"train/{name}": value for name, value in metrics.items()}
        return Credited(steps, scores, logged, tokens.by_rollout(advantages.advantages_N))

    def _advantages(
        self, batch: RolloutBatch, scores: Scores, estimator: AdvantageEstimator
    ) -> tuple[TokenScores, Advantages]:
        try:
            token_scores = batch.tokens.scores(scores)
            return token_scores, estimator(batch.groups, batch.tokens, token_scores)
        except ValueError as error:
            raise _refused(error) from error

    def _steps(
        self,
        batch: RolloutBatch,
        scores: Scores,
        advantages: Advantages,
    ) -> list[OptimizerStep]:
        algorithm = self.algorithm
        try:
            return batch.steps(
                scores,
                advantages,
                algorithm.weights,
                num_steps=self.num_steps,
                policy_term_only=algorithm.policy_term_only,
                coefficients=algorithm.controls.coefficients,
            )
        except ValueError as error:
            raise _refused(error) from error

    async def _scores(self, batch: RolloutBatch, *, in_step: bool) -> Scores:
        """in_step: without the proximal logprobs, for which those of the engine stand."""
        samples, algorithm = batch.tokens.samples, self.algorithm
        roles = tuple(role for role in algorithm.roles if not (in_step and role == "old"))
        if not roles:
            return Scores(proximal=tuple(sample.logprobs for sample in samples))
        scores = await self.trainer.score(samples, roles, statistics=algorithm.statistics)
        return replace(scores, ends=await self._ends(batch)) if algorithm.bootstraps else scores

    async def _with_the_rest(
        self, batch: RolloutBatch, scores: Scores, steps: Sequence[OptimizerStep]
    ) -> Scores:
        """The scores with the proximal logprobs of the tokens that no step has, which count in metrics."""
        samples = batch.tokens.samples
        in_steps = {index for step in steps for index in step.indices}
        rest = [i for i, s in enumerate(samples) if i not in in_steps and s.loss_mask.any()]
        if not rest:
            return scores
        scored = await self.trainer.score([samples[i] for i in rest])
        proximal = list(scores.proximal)
        for index, logprobs in zip(rest, scored.proximal, strict=True):
            proximal[index] = logprobs
        return replace(scores, proximal=tuple(proximal))

    async def _ends(self, batch: RolloutBatch) -> dict[RolloutId, float]:
        """What the critic expects after the last token of each rollout that was cut off."""
        cut_off = batch.cut_off()
        if not cut_off:
            return {}
        scores = await self.trainer.score([*cut_off.values()], ("values",))
        assert scores.values is not None, "a trainer that bootstraps has a critic"
        return {id: float(values[-1]) for id, values in zip(cut_off, scores.values, strict=True)}


def _spread(advantages: Advantages) -> dict[str, float]:
    """Mean and standard deviation of the advantages over trainable tokens."""
    values_N = advantages.advantages_N
    if not len(values_N):
        return {}
    return {"advantages/mean": float(values_N.mean()), "advantages/std": float(values_N.std())}


def _refused(error: ValueError) -> UserError:
    return UserError(f"no credit can be given: {error}.")


_CHECKED_TOKENS = 100


async def taught(
    teacher: Teacher | None,
    samples: Sequence[Sample],
    trainer: Trainer,
    scoring: Awaitable[Scores],
    clock: Callable[[], float],
) -> tuple[Scores, dict[str, float]]:
    """The trainer's scores with those of the teacher, and its metrics.

    Waits for: `scoring`, which uses the trainer, and the teacher. Where the teacher does not use the trainer,
    both are at work at once. On cancellation: the teacher is cancelled.

    Raises:
        TeacherError: a server of the teacher has failed.
    """
    if teacher is None or not samples:
        return await scoring, {}

    async def timed() -> tuple[tuple[FloatArray, ...], float]:
        began = clock()
        return await teacher.logprobs(samples, trainer), clock() - began

    if teacher.uses_trainer:
        scores = await scoring
        logprobs, seconds = await timed()
    else:
        task = asyncio.create_task(timed())
        try:
            scores = await scoring
            logprobs, seconds = await task
        finally:
            task.cancel()
            await asyncio.wait([task])
    return replace(scores, teacher=logprobs), {"perf/teacher_time": seconds}


async def check_served(algorithm: Algorithm | None, config: RunConfig, source: ModelSource) -> None:
    """Check that the teacher's servers, where it has some, are reachable and have the policy's tokenizer.

    Raises:
        TeacherError: one cannot be reached, or refuses.
        ConfigError: one has another tokenizer.
    """
    teacher = None if algorithm is None else algorithm.teacher
    if not isinstance(teacher, ServedTeacher) or config.rollout.num_rollout == 0:
        return
    tokenizer = source.tokenizer
    ids = sorted(tokenizer.get_vocab().values())
    some = ids[:: max(len(ids) // _CHECKED_TOKENS, 1)]
    text = str(tokenizer.decode(some, skip_special_tokens=True))
    await teacher.check(text, tokenizer.encode(text, add_special_tokens=False))
