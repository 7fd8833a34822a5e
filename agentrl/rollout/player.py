"""What a producer needs of whatever plays its groups."""

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
    """Plays groups, and accounts for those that are cancelled."""

    @property
    def stop(self) -> Callable[[], Awaitable[None]] | None:
        """Stops all groups in flight, so that they can go on later; None = they cannot."""

    def play(
        self, prompt: Prompt, version: int, begun: GroupInProgress | None = None
    ) -> Coroutine[None, None, GroupOutcome]:
        """Play a group, or go on with it; `version` is the policy's when it starts."""

    def cancelled(self, prompt: Prompt) -> GroupOutcome:
        """The outcome of a group whose `play` was cancelled."""
