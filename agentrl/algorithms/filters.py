"""Which groups have something to say."""

from __future__ import annotations

from agentrl.types import Group


def has_signal(group: Group) -> bool:
    """Whether siblings did differently, so that some advantage is not zero."""
    return len({verdict.total for verdict in group.verdicts}) > 1
