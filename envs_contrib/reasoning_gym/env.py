"""The environment of one generator: the library makes the questions and scores the answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from agentrl import Limits, Message, SingleTurnEnv, Task, UserError
from envs_contrib.reasoning_gym.answers import is_readable

NUM_QUESTIONS: Mapping[str, int] = {"train": 1000, "test": 200}
_SEEDS: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_Entry = Mapping[str, object]
_DISTINCT = 0.75
"""A generator has few questions where a smaller share of those of the test's seeds are distinct."""

# Exceptions of scorers for text of a model: they expect answers of the right form.
_SCORER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _Generator(Protocol):
    def __getitem__(self, index: int) -> _Entry: ...

    def score_answer(self, answer: str, entry: _Entry) -> float: ...


class _Source(NamedTuple):
    """A generator, the number of its questions by split, and its settings."""

    generator: str
    numbers: tuple[tuple[str, int], ...]
    settings: tuple[tuple[str, object], ...]


class ReasoningGym(SingleTurnEnv):
    """Questions of one generator of the reasoning-gym library, scored by the library itself.

    generator: its name in the library. settings: those of the generator, by the library's names.
    chance: the declared chance_score. num_train, num_test: questions that are made for a split.
    Partial credit is the library's. Question n of a split is drawn from its seed + n. No question is in both
    splits: one that both seeds draw is a test question; of a generator with few, each split has half.
    An answer that a scorer must not read (`is_readable`) is scored as the empty one.

    Raises:
        UserError: the library is not installed, or has no such generator or setting.
    """

    group = "reasoning"
    needs = ("reasoning-gym",)
    limits = Limits(max_turns=1, max_tokens=8192)

    def __init__(
        self,
        generator: str,
        *,
        chance: float = 0.0,
        num_train: int = NUM_QUESTIONS["train"],
        num_test: int = NUM_QUESTIONS["test"],
        **settings: object,
    ) -> None:
        super().__init__()
        self.generator = generator
        self.chance_score = chance
        numbers = {"train": num_train, "test": num_test}
        self._source = _Source(generator, tuple(sorted(numbers.items())), tuple(sorted(settings.items())))

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions of a split."""
        return _tasks(self._source, split)

    def grade(self, task: Task, answer: str) -> float:
        """The library's own score, in [0, 1]; 0.0 for an answer that its scorer cannot parse."""
        dataset, entries = _questions(self._source, task.split)
        number = task.metadata["number"]
        assert isinstance(number, int)
        answer = answer.strip()
        if not is_readable(self.generator, answer, (task.answer or "").strip()):
            answer = ""
        try:
            score = float(dataset.score_answer(answer, entries[number]))
        except _SCORER_ERRORS:
            return 0.0
        return score if 0.0 <= score <= 1.0 else 0.0


@lru_cache(maxsize=128)
def _questions(source: _Source, split: str) -> tuple[_Generator, Sequence[_Entry]]:
    """A generator, and its questions of a split."""
    try:
        import reasoning_gym
        from reasoning_gym.code.contrib.bfit.Compiler import Optimizer
    except ImportError:
        raise UserError(
            f"the generator `{source.generator}` needs the package reasoning-gym; "
            "install it with `pip install 'agentrl[reasoning-gym]'`."
        ) from None
    # The compiler of the generator `bf` prints a dot for each program; standard output is for results.
    vars(Optimizer)["print"] = _print_nothing
    number = dict(source.numbers)[split]
    try:
        dataset: _Generator = reasoning_gym.create_dataset(
            source.generator, seed=_SEEDS[split], size=number, **dict(source.settings)
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"reasoning-gym makes no `{source.generator}`: {error}.") from None
    return dataset, [dataset[k] for k in range(number)]


def _print_nothing(*values: object, **options: object) -> None:
    del values, options


@lru_cache(maxsize=128)
def _tasks(source: _Source, split: str) -> tuple[Task, ...]:
    """The test split is made without the training split, whose questions take a while in some generators."""
    test = _by_prompt(source, "test")
    # A generator that repeats itself has few questions: the test's seeds draw most of them.
    if len(test) < _DISTINCT * dict(source.numbers)["test"]:
        return tuple(t for prompt, t in _by_prompt(source, split).items() if _split_of(prompt) == split)
    if split == "test":
        return tuple(test.values())
    return tuple(task for prompt, task in _by_prompt(source, split).items() if prompt not in test)


@lru_cache(maxsize=128)
def _by_prompt(source: _Source, split: str) -> Mapping[str, Task]:
    """The questions of a split's seeds, each once."""
    tasks: dict[str, Task] = {}
    for number, entry in enumerate(_questions(source, split)[1]):
        text, id = str(entry["question"]), f"{split}-{number}"
        task = Task(id, (Message("user", text),), str(entry["answer"]), {"number": number}, split)
        tasks.setdefault(text, task)
    return tasks


def _split_of(prompt: str) -> str:
    """The split of a question of a generator with few: half of them for each."""
    return "test" if zlib.crc32(prompt.encode("utf-8", "replace")) % 2 else "train"
