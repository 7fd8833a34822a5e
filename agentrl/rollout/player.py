"""What plays groups, in this process or in others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

from agentrl.data import Prompt
from agentrl.rollout.group import GroupInProgress, GroupOutcome


class PlayGroup(Protocol):
    """Plays the group of a prompt against the policy that serves `version`."""

    def __call__(
        self, prompt: Prompt, *, version: int, begun: GroupInProgress | None = None
    ) -> Coroutine[None, None, GroupOutcome]:
        """Start playing, or go on with a group that was stopped."""


class Player(Protocol):
    """Plays groups: a `GroupPlayer` in this process, `Players` in processes of their own, or a simulation."""

    @property
    def play(self) -> PlayGroup:
        """Plays one group."""

    def cancelled(self, prompt: Prompt) -> GroupOutcome:
        """The outcome of a group whose `play` was cancelled."""

    @property
    def stop(self) -> Callable[[], Awaitable[None]] | None:
        """Stops all groups in play, so that they can go on later; None = they cannot."""
