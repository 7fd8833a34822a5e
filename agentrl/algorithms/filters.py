"""Which groups are worth a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentrl.types import Group


class Split(NamedTuple):
    """Groups to train on, and groups that were dropped for `zero_std`; both keep their order."""

    trained: tuple[Group, ...]
    dropped: tuple[Group, ...]


def has_signal(group: Group) -> bool:
    """Whether siblings did differently, so that some advantage is not zero."""
    return len({verdict.total for verdict in group.verdicts}) > 1


def split_by_signal(groups: Sequence[Group]) -> Split:
    """Set aside the groups whose rewards are all equal: their advantages are all 0.

    Dropping them changes the token-mean's denominator, which is the point: a batch with
    little signal takes a step as large as one with much.
    """
    return Split(
        tuple(group for group in groups if has_signal(group)),
        tuple(group for group in groups if not has_signal(group)),
    )
