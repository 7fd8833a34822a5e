"""An environment's own tasks as a source."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cached_property, lru_cache

from agentrl.data.source import DataSource
from agentrl.errors import ConfigError
from agentrl.types import Task

_MAX_HASHED = 10_000


class TaskSource(DataSource):
    """Tasks of a split: every epoch goes through all of them, in an order of its own.

    shuffle: whether the order is drawn, by the seed and the epoch.

    Raises:
        ConfigError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True) -> None:
        super().__init__(seed=seed)
        if not tasks:
            raise ConfigError("the split holds no tasks; name a split that the environment fills.")
        self._tasks = tasks
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._drawn)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tasks; of ten thousand where there are more."""
        step = -(-len(self._tasks) // _MAX_HASHED)
        digest = hashlib.blake2b(f"{len(self._tasks)} {self._shuffle}".encode(), digest_size=16)
        for place in range(0, len(self._tasks), step):
            digest.update(repr(self._tasks[place]).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @property
    def num_tasks(self) -> int:
        """Tasks of an epoch."""
        return len(self._tasks)

    def task(self, ordinal: int) -> Task:
        """The task of a number."""
        epoch, place = divmod(ordinal, len(self._tasks))
        return self._tasks[self._order(epoch)[place]]

    def _drawn(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"order/{self.seed}/{epoch}").shuffle(order)
        return order
