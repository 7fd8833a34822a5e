"""Groups that could not be played: how many in a row end a run."""

from __future__ import annotations

from agentrl.errors import WorldBrokenError
from agentrl.rollout.group import GroupOutcome


class BrokenGroups:
    """Counts broken groups in a row, in the order of their start, since those that fail at once end first.

    max_in_a_row: so many end the run (count).
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row, self._in_a_row = max_in_a_row, 0
        # In the order of their start, from the first one that is in flight: None while they are.
        self._unsettled: dict[int, GroupOutcome | None] = {}

    @property
    def num_unsettled(self) -> int:
        """Broken groups that have ended before a group that started earlier (count)."""
        return sum(outcome is not None and _is_broken(outcome) for outcome in self._unsettled.values())

    def start(self, ordinal: int) -> None:
        """A group starts."""
        self._unsettled[ordinal] = None

    def end(self, ordinal: int, outcome: GroupOutcome) -> None:
        """A group ends.

        Raises:
            WorldBrokenError: it is the last of `max_in_a_row` broken ones.
        """
        self._unsettled[ordinal] = outcome
        while self._unsettled:
            first, settled = next(iter(self._unsettled.items()))
            if settled is None:
                return
            del self._unsettled[first]
            self._count(settled)

    def _count(self, outcome: GroupOutcome) -> None:
        if outcome.group is not None:
            self._in_a_row = 0
        if not _is_broken(outcome):
            return
        self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            episode = outcome.failed[-1]
            failure = episode.failure
            cause = f"{failure.stage} failed: {failure.detail}" if failure else str(episode.ending)
            raise WorldBrokenError(
                f"{episode.env_id}: {self._in_a_row} groups in a row could not be played "
                f"(last: {cause}); mend the environment, `agentrl eval` with it plays single episodes."
            )


def _is_broken(outcome: GroupOutcome) -> bool:
    return outcome.group is None and not outcome.reason
