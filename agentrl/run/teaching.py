"""A teacher's part of an iteration: it scores the batch beside the trainer, or after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.types import FloatArray, Sample, Scores
from agentrl.types.seams import Teacher, Trainer
from agentrl.weights.hf.source import ModelSource

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
