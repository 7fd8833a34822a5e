"""Functions of the user that see a whole batch: each is called in its place, and its errors name it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TypeAlias, TypeVar

from agentrl.algorithms.contract import small_groups
from agentrl.algorithms.conversion import Conversion, converted
from agentrl.algorithms.filters import RolloutFilter, removed_rollouts
from agentrl.algorithms.post_process import RewardPostProcess, post_processed
from agentrl.algorithms.steps import RolloutBatch
from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.tools import run
from agentrl.types import Group, RolloutId
from agentrl.types.seams import PublishReport

T = TypeVar("T")

RolloutLog: TypeAlias = Callable[[int, Sequence[Group]], Mapping[str, float]]
"""From an iteration, from 1 on, and all groups that were played for it, dropped ones too, to metrics."""

AfterPublishing: TypeAlias = Callable[[PublishReport], object]
"""Called when the engine serves new weights; sync or async."""


@dataclass(frozen=True, slots=True)
class BatchFunctions:
    """Those that a run has, in the order in which a batch meets them; None = it has none of the kind."""

    removed: RolloutFilter | None = None
    convert: Conversion | None = None
    post_process: RewardPostProcess | None = None
    log: RolloutLog | None = None
    after_publishing: AfterPublishing | None = None

    async def removed_of(self, groups: Sequence[Group]) -> Mapping[RolloutId, str]:
        """The rollouts that are taken out of the loss, each with the reason.

        Raises:
            UserError: the function failed.
        """
        function = self.removed
        if function is None:
            return {}
        return await called("rollout sample filter", lambda: removed_rollouts(function, groups))

    async def converted(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with the samples that the conversion makes of its own.

        Raises:
            UserError: the function failed.
        """
        function = self.convert
        if function is None:
            return batch
        samples = [sample for group in batch.groups for sample in batch.samples[group.id]]
        return batch.with_samples(
            await called("conversion of samples", lambda: converted(function, batch.groups, samples))
        )

    async def scored(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups with the scores that count.

        Raises:
            UserError: the function failed.
        """
        function = self.post_process
        if function is None:
            return groups
        return await called("reward post-processing", lambda: post_processed(function, groups))

    async def metrics(
        self, step: int, groups: Sequence[Group], known: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of the function's own. step: from 1. known: those that the step has already.

        Raises:
            UserError: the function failed, or took a name that a metric has.
        """
        function = self.log
        if function is None:
            return {}
        return await called("rollout log function", lambda: own_metrics(function(step, groups), known))

    async def published(self, report: PublishReport) -> None:
        """The engine serves new weights.

        Raises:
            UserError: the function failed.
        """
        function = self.after_publishing
        if function is not None:
            await _awaited("function after publishing", run(partial(function, report), thread=None))


def own_metrics(returned: object, known: Mapping[str, float] = {}) -> dict[str, float]:
    """Metrics that a function of the user returned; None is none.

    known: those that are there already.

    Raises:
        ValueError: it is no mapping of names to numbers, or a name is taken.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise ValueError(f"metrics are numbers by name, not {repr(returned)[:80]}")
    metrics = {}
    for name, value in returned.items():
        if not (isinstance(name, str) and name):
            raise ValueError(f"the name of a metric is a text, not {name!r}")
        if name in known:
            raise ValueError(f"there is a metric {name} already; use another name")
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"the metric {name} is {repr(value)[:80]}, not a finite number")
        metrics[name] = float(value)
    return metrics


def check_rollout_log(function: RolloutLog) -> None:
    """Check that a rollout log function satisfies its contract: use it in the tests of your own.

    It is called with an iteration and groups of different sizes, then with one group. It must return a
    mapping of names to finite numbers, or None.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The function's own errors are not
            caught.
    """
    own_metrics(function(1, small_groups()))
    own_metrics(function(2, small_groups()[:1]))


def check_after_publishing(function: AfterPublishing) -> None:
    """Check that a function can be called after new weights were published; it is not called.

    Raises:
        ValueError: it takes other arguments.
    """
    try:
        inspect.signature(function).bind(PublishReport(1, 0, 0.0))
    except TypeError as error:
        raise ValueError(f"it is called with a PublishReport ({error})") from None


async def called(noun: str, call: Callable[[], T]) -> T:
    """What a function of the user's returned.

    Raises:
        UserError: it failed; the sentence names it.
    """

    async def begun() -> T:
        return call()

    return await _awaited(noun, begun())


async def _awaited(noun: str, call: Awaitable[T]) -> T:
    try:
        async with stage("filter", None):
            return await call
    except StageError as error:
        raise UserError(f"the {noun} failed ({error.detail}); mend it.") from error
