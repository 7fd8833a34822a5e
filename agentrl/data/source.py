"""Sources of prompts, addressed by number, such as the tasks of an environment; the stream over a source."""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pydantic import TypeAdapter

from agentrl.errors import ConfigError
from agentrl.records import lines
from agentrl.types import JSON, Group, Task

TOO_LONG = "prompt_too_long"
"""The reason of a prompt that has more tokens than `rollout_max_prompt_len`."""

_MAX_SKIPPED_IN_A_ROW = 10_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task, the seed of the world of its group, and its number among all prompts of the run."""

    index: int
    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A number without a prompt.

    reason: the key of its counter. detail: an explanation for the user.
    """

    index: int
    reason: str
    detail: str = ""


class DataSource(ABC):
    """An unbounded sequence of prompts, addressed by number (ordinal).

    `prompt(ordinal)` is a function of the content, the seed and the ordinal only. Any ordinal may be
    requested at any time, and always has the same prompt. So the state of a run's data is one number: the
    next ordinal.

        class Squares(DataSource):
            fingerprint = "squares 1"

            def task(self, ordinal):
                return Task.ask(f"{ordinal}", f"What is {ordinal} times {ordinal}?", str(ordinal**2))

    `data_source_path = "my_data:Squares"` in a run calls `Squares(seed=...)`. `check_data_source` checks
    the contract.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the content: it differs where any prompt may differ."""

    @abstractmethod
    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number from 0 on."""

    @property
    def num_tasks(self) -> int | None:
        """Tasks of an epoch; None = there are no epochs."""
        return None

    def prompt(self, ordinal: int) -> Prompt | Skipped:
        """The prompt of a number from 0 on, or `Skipped` with the reason."""
        task = self.task(ordinal)
        if isinstance(task, Skipped):
            return replace(task, index=ordinal)
        return Prompt(ordinal, task, world_seed(self.seed, ordinal))

    def check(self, fingerprint: str) -> None:
        """Check that the content has this fingerprint.

        Raises:
            ConfigError: the fingerprint differs.
        """
        if self.fingerprint != fingerprint:
            raise ConfigError(
                "the prompts are not those that the run began with (the data, or a setting "
                "of it, has changed): "
                "restore them, or start a new run."
            )

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Hear of the groups of an iteration, once it has ended; a source that stays as it is does not."""
        del groups

    def state(self, pending: Iterable[int]) -> JSON:
        """What a checkpoint keeps of it. pending: numbers that were drawn and will be requested again."""
        del pending
        return None

    def restore(self, state: JSON) -> None:
        """Be as it was at a checkpoint; before the first prompt of a run."""
        del state

    def preview(self) -> DataSource:
        """A source of the same prompts, whose requests leave this one as it is."""
        return self


class AdaptiveSource(DataSource):
    """A source whose next prompts depend on the groups that were played: a curriculum.

    `draw` is called once for each number, in their order. What was drawn stays: a run that resumes has the
    same prompts for groups that were in flight. Groups are heard of between two iterations, in the order of
    their prompts; with max_staleness above 0, prompts of the next batches have been drawn by then.

        class Doubling(AdaptiveSource):
            fingerprint = "doubling 1"

            def __init__(self, *, seed=0):
                super().__init__(seed=seed)
                self.largest = 10

            def draw(self, ordinal):
                number = random.Random(f"{self.seed}/{ordinal}").randrange(self.largest)
                return Task.ask(f"{ordinal}", f"What is twice {number}?", str(2 * number))

            def add_groups(self, groups):
                if all(verdict.total == 1.0 for group in groups for verdict in group.verdicts):
                    self.largest *= 2

            def save(self):
                return self.largest

            def load(self, saved):
                self.largest = saved
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._drawn: dict[int, Task | Skipped] = {}
        self._next = 0

    @abstractmethod
    def draw(self, ordinal: int) -> Task | Skipped:
        """The next task."""

    @abstractmethod
    def save(self) -> JSON:
        """What `draw` depends on besides its number and the seed."""

    @abstractmethod
    def load(self, saved: JSON) -> None:
        """Go on with what `save` returned."""

    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number, which is drawn now unless it was."""
        while self._next <= ordinal:
            self._drawn[self._next] = self.draw(self._next)
            self._next += 1
        if ordinal not in self._drawn:
            raise ConfigError(f"prompt {ordinal} was drawn and is over; it cannot be requested again.")
        return self._drawn[ordinal]

    def state(self, pending: Iterable[int]) -> JSON:
        """What was drawn and is pending, and what the next draws depend on."""
        kept = {n: task for n in pending if isinstance(task := self._drawn.get(n), Task)}
        self._drawn = {n: task for n, task in self._drawn.items() if n in kept}
        drawn = {str(n): lines.as_json(_TASK, task) for n, task in kept.items()}
        return {"next": self._next, "drawn": drawn, "own": self.save()}

    def restore(self, state: JSON) -> None:
        """Be as it was at a checkpoint.

        Raises:
            ConfigError: the checkpoint is of another source.
        """
        if not isinstance(state, dict) or not isinstance(drawn := state.get("drawn"), dict):
            raise ConfigError("the run began with another source of prompts; restore data_source_path.")
        self._next = int(str(state["next"]))
        self._drawn = {int(n): _TASK.validate_python(task) for n, task in drawn.items()}
        self.load(state["own"])

    def preview(self) -> DataSource:
        """A copy, which draws without an effect on this one."""
        return copy.deepcopy(self)


_TASK = TypeAdapter(Task)


def world_seed(seed: int, ordinal: int) -> int:
    """The seed of the world that all episodes of a group share, for the prompt of this number."""
    return random.Random(f"world/{seed}/{ordinal}").getrandbits(31)


class PromptStream:
    """Iterates over the prompts of a source; counts the skipped numbers and leaves them out.

    next_ordinal: the next number that was never drawn. pending: numbers before it that come first, in this
    order: they were drawn before a restart, and their groups were not trained. skipped: the numbers that were
    left out since `take_skipped` (count), by reason. These three are the complete state.
    """

    def __init__(self, source: DataSource, next_ordinal: int = 0) -> None:
        self.source = source
        self.next_ordinal = next_ordinal
        self.pending: deque[int] = deque()
        self.skipped: Counter[str] = Counter()

    def resume(self, pending: Iterable[int], skipped: Mapping[str, int]) -> None:
        """Go on with this state; see the class. Before the first `next`."""
        self.pending, self.skipped = deque(pending), Counter(skipped)

    @property
    def fingerprint(self) -> str:
        """That of the source."""
        return self.source.fingerprint

    def add_groups(self, groups: Sequence[Group]) -> None:
        """The source hears of the groups of an iteration, once it has ended."""
        self.source.add_groups(groups)

    def source_state(self, pending: Iterable[int]) -> JSON:
        """What a checkpoint keeps of the source. pending: numbers that will be requested again."""
        return self.source.state(pending)

    def next(self) -> Prompt:
        """The next prompt.

        Raises:
            ConfigError: ten thousand consecutive numbers were skipped.
            DataError: a row of a file is no prompt.
        """
        for _ in range(_MAX_SKIPPED_IN_A_ROW):
            if self.pending:
                prompt = self.source.prompt(self.pending.popleft())
            else:
                prompt = self.source.prompt(self.next_ordinal)
                self.next_ordinal += 1
            if isinstance(prompt, Prompt):
                return prompt
            self.skipped[prompt.reason] += 1
            last = prompt
        # A source of the user's own has reasons of its own.
        remedy = "raise rollout_max_prompt_len, or give" if last.reason == TOO_LONG else "give"
        raise ConfigError(
            f"{_MAX_SKIPPED_IN_A_ROW:,} prompts in a row were skipped (last: {last.reason}, {last.detail}); "
            f"{remedy} other prompts."
        )

    def take_skipped(self) -> dict[str, int]:
        """The number of prompts skipped since the last call, by reason; resets the counters."""
        counts, self.skipped = self.skipped, Counter()
        return dict(counts)


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
