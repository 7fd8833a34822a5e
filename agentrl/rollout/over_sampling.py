"""Over-sampling: more prompts than a batch has groups, of which it takes those that end first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from agentrl.algorithms.filters import BufferFilter, chosen_ids
from agentrl.data import Prompt
from agentrl.errors import StageError, UserError
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.occupancy import Occupancy
from agentrl.rollout.player import PlayGroup
from agentrl.rollout.producer import EarlyEnd, Producer, ProducerSettings
from agentrl.runtime.stage import stage

OVER_SAMPLED: Final = "over_sampled"
"""Why a group is dropped that was not among the first of a batch."""
NOT_CHOSEN: Final = "not_chosen"
"""Why a group is dropped that the buffer filter did not choose."""


class OverSampling(NamedTuple):
    """How a batch is over-sampled.

    size: prompts that start at a time (count). cancelled: the outcome of a group whose playing was cancelled.
    choose: the buffer filter; None = the first groups to end.
    """

    size: int
    cancelled: Callable[[Prompt], GroupOutcome]
    choose: BufferFilter | None = None


class OverSamplingProducer(Producer):
    """Starts `size` prompts at a time, and again where those in flight cannot fill the batch.

    A batch takes the first `batch_size` groups to end that the dynamic sampling filter keeps. The others are
    dropped as `over_sampled`, complete or not: the next version of the weights is served from then on, and a
    group of an older one would be off-policy. Which groups are first depends on the speed of engines and
    tools. A buffer filter waits for all prompts in flight and chooses among their groups; that choice depends
    on the groups only.

    Either way a batch is in the order of start, and nothing is in flight between two batches.

    consumes: prompts. waits for: the next group to end. unblocked by: its end. on shutdown: close() cancels
    what is in flight.

    Raises (from take):
        WorldBrokenError: `max_broken` groups in a row could not be played.
        UserError: `max_num_gen_batches` times `size` groups were dropped for one batch; the buffer filter
        failed.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        play_group: PlayGroup,
        settings: ProducerSettings,
        over_sampling: OverSampling,
    ) -> None:
        size, cancelled, choose = over_sampling
        super().__init__(next_prompt, play_group, settings, early=EarlyEnd(cancelled, OVER_SAMPLED))
        self._size, self._choose = size, choose
        self._max_played = settings.max_num_gen_batches * size

    @property
    def occupancy(self) -> Occupancy:
        """The places at this moment: prompts that start at a time, and the groups that they are added to."""
        current = super().occupancy
        return current._replace(capacity=max(self._size, current.taken))

    async def take(self) -> list[GroupOutcome]:
        """The next batch: `batch_size` kept groups, and all others that were started for it."""
        complete = await self._filled()
        taken = (
            set(complete[: self._settings.batch_size])
            if self._choose is None
            else await self._preferred(self._choose)
        )
        await self._in_flight.cancel_all()
        self._in_flight.raise_failure()
        reason = OVER_SAMPLED if self._choose is None else NOT_CHOSEN
        for ordinal in self._buffer.kept:
            if ordinal not in taken:
                self._buffer.drop(ordinal, reason)
        return self._taken(sorted(taken))

    def _chosen(self) -> list[int] | None:
        """The kept groups in the order of their end, once there are enough."""
        self._in_flight.raise_failure()
        if len(self._buffer.kept) + len(self._in_flight.tasks) < self._settings.batch_size:
            self._start_prompts()
        complete = list(self._buffer.kept)
        is_full = len(complete) >= self._settings.batch_size
        return complete if is_full and (self._choose is None or not self._in_flight.tasks) else None

    def _admit(self) -> None:
        """Nothing: prompts start in `take`, where those in flight cannot fill the batch."""

    def _start_prompts(self) -> None:
        if self._buffer.num_dropped + self._size > self._max_played:
            raise UserError(self._buffer.no_signal(self._settings.batch_size))
        for _ in range(self._size):
            self._start()

    async def _preferred(self, choose: BufferFilter) -> set[int]:
        """The ordinals of the groups that the buffer filter chooses."""
        groups = dict(sorted(self._buffer.kept.items()))
        try:
            async with stage("filter", None):
                ids = chosen_ids(choose, list(groups.values()), self._settings.batch_size)
        except StageError as error:
            raise UserError(f"the buffer filter failed ({error.detail}); mend it.") from error
        return {ordinal for ordinal, group in groups.items() if group.id in ids}
