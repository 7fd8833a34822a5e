"""Prompts by their number: what a run draws from, and the stream over it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError
from agentrl.types import Task

TOO_LONG = "prompt_too_long"
"""The reason of a prompt that has more tokens than `rollout_max_prompt_len`."""

_MAX_SKIPPED_IN_A_ROW = 10_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task, the seed of the world its whole group will see, and its number among all prompts of the run."""

    index: int
    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A number that has no prompt.

    reason: a word that it is counted under. detail: what a person wants to know.
    """

    index: int
    reason: str
    detail: str = ""


class DataSource(ABC):
    """Prompts without end, by their number.

    `prompt(ordinal)` is a function of the content, the seed and the ordinal, and of nothing else. Any ordinal
    may be asked for at any time, and gives the same again. So the state of a run's data is one number: the
    next ordinal.

        class Squares(DataSource):
            fingerprint = "squares 1"

            def task(self, ordinal):
                return Task.ask(f"{ordinal}", f"What is {ordinal} times {ordinal}?", str(ordinal**2))

    `data_source_path = "my_data:Squares"` in a run calls `Squares(seed=...)`. `check_data_source` checks one.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the content: another one where any prompt may be another."""

    @abstractmethod
    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number from 0 on."""

    @property
    def num_tasks(self) -> int | None:
        """Tasks of an epoch; None = there are no epochs."""
        return None

    def prompt(self, ordinal: int) -> Prompt | Skipped:
        """The prompt of a number from 0 on, or why it has none."""
        found = self.task(ordinal)
        if isinstance(found, Skipped):
            return replace(found, index=ordinal)
        return Prompt(ordinal, found, world_seed(self.seed, ordinal))

    def check(self, fingerprint: str) -> None:
        """See that the content is the one that had this fingerprint.

        Raises:
            ConfigError: it is another.
        """
        if self.fingerprint != fingerprint:
            raise ConfigError(
                "the prompts are not those that the run began with (the data, or a setting "
                "of it, has changed): "
                "restore them, or start a new run."
            )


def world_seed(seed: int, ordinal: int) -> int:
    """The seed of the world in which all siblings play the prompt of this number."""
    return random.Random(f"world/{seed}/{ordinal}").getrandbits(31)


class PromptStream:
    """The prompts of a source, one after another; skipped ones are counted and passed over.

    next_ordinal: where it goes on, and all of its state.
    """

    def __init__(self, source: DataSource, next_ordinal: int = 0) -> None:
        self.source = source
        self.next_ordinal = next_ordinal
        self._skipped: Counter[str] = Counter()

    def next(self) -> Prompt:
        """The next prompt.

        Raises:
            ConfigError: ten thousand in a row were skipped.
            DataError: a row of a file is no prompt.
        """
        for _ in range(_MAX_SKIPPED_IN_A_ROW):
            found = self.source.prompt(self.next_ordinal)
            self.next_ordinal += 1
            if isinstance(found, Prompt):
                return found
            self._skipped[found.reason] += 1
            last = found
        raise ConfigError(
            f"{_MAX_SKIPPED_IN_A_ROW:,} prompts in a row were skipped (last: {last.reason}, {last.detail}); "
            "raise rollout_max_prompt_len, or give other prompts."
        )

    def take_skipped(self) -> dict[str, int]:
        """How many prompts were skipped since the last call, by reason."""
        taken, self._skipped = self._skipped, Counter()
        return dict(taken)
