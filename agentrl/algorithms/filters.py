"""Which groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from agentrl.types import Group

GroupFilter: TypeAlias = Callable[[Group], str | None]
"""A dynamic sampling filter: why a group is dropped and another one is played for it; None = it is kept.

The reason is one word such as `too_easy`, counted as `rollout/dynamic_filter/drop_too_easy`.
"""

ZERO_STD = "zero_std"


def has_signal(group: Group) -> bool:
    """Whether the rewards of siblings differ in some trained role, so that some advantage is not zero."""
    roles = [group.siblings(agent) for agent in group.trained_agents]
    return any(len({rollout.verdict.total for rollout in siblings}) > 1 for siblings in roles)


def zero_std(group: Group) -> str | None:
    """Drop a group whose siblings have equal rewards (dynamic sampling, DAPO, arXiv 2503.14476)."""
    return None if has_signal(group) else ZERO_STD
