"""The tasks of an environment as a source."""

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
    """Tasks of a split: every epoch has all of them, in its own order.

    shuffle: whether each epoch is shuffled, by the seed and its number.

    Raises:
        ConfigError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True) -> None:
        super().__init__(seed=seed)
        if not tasks:
            raise ConfigError("the split holds no tasks; name a split that the environment fills.")
        self._tasks = tasks
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tasks; of a sample of ten thousand where there are more."""
        step = -(-len(self._tasks) // _MAX_HASHED)
        digest = hashlib.blake2b(f"{len(self._tasks)} {self._shuffle}".encode(), digest_size=16)
        for position in range(0, len(self._tasks), step):
            digest.update(repr(self._tasks[position]).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @property
    def num_tasks(self) -> int:
        """Tasks of an epoch."""
        return len(self._tasks)

    def task(self, ordinal: int) -> Task:
        """The task of a number."""
        epoch, position = divmod(ordinal, len(self._tasks))
        return self._tasks[self._order(epoch)[position]]

    def _draw_order(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"order/{self.seed}/{epoch}").shuffle(order)
        return order
