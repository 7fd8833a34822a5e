"""Which groups, and which rollouts of them, are trained on.

GroupFilter      as a group ends      drops it, and another one is played for it
BufferFilter     as a batch is made   chooses the groups of the batch among those that were played for it
RolloutFilter    as a batch is made   takes single rollouts out of the loss
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from agentrl.types import Ending, Group, RolloutId

GroupFilter: TypeAlias = Callable[[Group], str | None]
"""A dynamic sampling filter: why a group is dropped and another one is played for it; None = it is kept.

The reason is one word such as `too_easy`, counted as `rollout/dynamic_filter/drop_too_easy`.
"""

BufferFilter: TypeAlias = Callable[[Sequence[Group], int], Sequence[Group]]
"""From the groups that were played for a batch, in the order of their start, and the size of the batch, to
its groups: so many of them, each once. The others are dropped (`rollout/dropped/not_chosen`).
"""

RolloutFilter: TypeAlias = Callable[[Sequence[Group]], Mapping[RolloutId, str]]
"""The rollouts of a batch that are taken out of its loss, each with the reason.

They count in the baselines of their groups, where advantages are whitened, and in the denominators of the
weights. The reason is one word such as `truncated`, counted as `rollout/sample_filter/drop_truncated`.
"""

ZERO_STD = "zero_std"


def has_signal(group: Group) -> bool:
    """Whether the rewards of siblings differ in some trained role, so that some advantage is not zero."""
    roles = [group.siblings(agent) for agent in group.trained_agents]
    return any(len({rollout.verdict.total for rollout in siblings}) > 1 for siblings in roles)


def zero_std(group: Group) -> str | None:
    """Drop a group whose siblings have equal rewards (dynamic sampling, DAPO, arXiv 2503.14476)."""
    return None if has_signal(group) else ZERO_STD


def highest_std(groups: Sequence[Group], number: int) -> list[Group]:
    """Choose the groups whose rewards have the highest standard deviation; of equal ones the first."""
    return sorted(groups, key=_largest_std, reverse=True)[:number]


def truncated(groups: Sequence[Group]) -> dict[RolloutId, str]:
    """Take truncated episodes out of the loss (overlong filtering, DAPO, arXiv 2503.14476)."""
    return {
        verdict.rollout_id: "truncated"
        for group in groups
        for episode in group.episodes
        for verdict in group.verdicts_of(episode)
        if episode.ending is Ending.TRUNCATED and verdict.agent in episode.trained_agents
    }


def chosen_ids(buffer_filter: BufferFilter, groups: Sequence[Group], number: int) -> frozenset[str]:
    """The ids of the groups that a buffer filter chooses for a batch of `number` groups.

    Raises:
        ValueError: it returned other groups, another number of them, or one of them twice.
    """
    chosen = buffer_filter(groups, number)
    is_group = isinstance(chosen, Sequence) and all(isinstance(group, Group) for group in chosen)
    ids = frozenset(group.id for group in chosen) if is_group else frozenset()
    if len(ids) != number or len(chosen) != number or not ids <= {group.id for group in groups}:
        returned = f"{len(chosen)} groups, {len(ids)} of them different" if is_group else repr(chosen)[:80]
        raise ValueError(
            f"a buffer filter returns {number} of the {len(groups)} groups, each once, not {returned}"
        )
    return ids


def removed_rollouts(rollout_filter: RolloutFilter, groups: Sequence[Group]) -> dict[RolloutId, str]:
    """The rollouts that a filter takes out of the loss of a batch, each with the reason.

    Raises:
        ValueError: it returned no mapping, a rollout that is not trained on, or a reason that is not one
        word.
    """
    removed = rollout_filter(groups)
    if not isinstance(removed, Mapping):
        raise ValueError(f"a rollout filter returns reasons by RolloutId, not {repr(removed)[:80]}")
    trained = {
        RolloutId(episode.id, agent)
        for group in groups
        for episode in group.episodes
        for agent in episode.trained_agents
    }
    if strangers := [id for id in removed if id not in trained]:
        raise ValueError(f"{strangers[0]!r} is no rollout of the batch that is trained on; use its RolloutId")
    for reason in removed.values():
        if not is_reason(reason):
            raise ValueError(f"the reason why a rollout is taken out of the loss is one word, not {reason!r}")
    return dict(removed)


def is_reason(value: object) -> bool:
    """Whether a value is one word: letters, digits, underscores."""
    return isinstance(value, str) and re.fullmatch(r"\w+", value) is not None


def _largest_std(group: Group) -> float:
    """The standard deviation of the rewards in the role where it is largest."""
    roles = [group.siblings(agent) for agent in group.trained_agents]
    return max((statistics.pstdev(r.verdict.total for r in role) for role in roles if role), default=0.0)
