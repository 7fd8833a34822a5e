"""The groups that have a gradient."""

from __future__ import annotations

from agentrl.types import Group


def has_signal(group: Group) -> bool:
    """Whether the rewards of siblings differ in some trained role, so that some advantage is not zero."""
    roles = [group.siblings(agent) for agent in group.trained_agents]
    return any(len({rollout.verdict.total for rollout in siblings}) > 1 for siblings in roles)
