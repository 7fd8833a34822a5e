"""After which iterations weights are published, and the reference moves."""

from __future__ import annotations

from typing import NamedTuple

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.rollout.config import RolloutConfig


class Publishing(NamedTuple):
    """When new weights are published.

    interval: iterations for each version (count). last_step: that of the last iteration, after which they
    always are; None = unknown. drains: no episode may be in flight then.
    """

    interval: int = 1
    last_step: int | None = None
    drains: bool = False

    @classmethod
    def of(cls, config: RolloutConfig) -> Publishing:
        """As configured."""
        drains = config.is_async and not config.spans_updates
        return cls(config.update_weights_interval, config.num_rollout - 1, drains)

    def is_due(self, step: int) -> bool:
        """Whether weights go out after this iteration, where there are new ones."""
        return (step + 1) % self.interval == 0 or step == self.last_step


class MovingReference(NamedTuple):
    """When the reference moves towards the policy. interval: iterations from one move to the next (count).
    share: that of the policy in it then."""

    interval: int
    share: float

    def is_due(self, step: int) -> bool:
        """Whether it moves in this iteration."""
        return (step + 1) % self.interval == 0


def moving_reference(config: AlgorithmConfig) -> MovingReference | None:
    """The configured one."""
    interval = config.ref_update_interval
    return None if interval is None else MovingReference(interval, config.ref_mixup_alpha)
