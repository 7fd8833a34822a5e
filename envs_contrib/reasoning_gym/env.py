"""The environment over one generator: the library makes the questions and scores the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from agentrl import Message, SingleTurnEnv, Task, UserError

NUM_QUESTIONS: Mapping[str, int] = {"train": 1000, "test": 200}
_SEEDS: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_Entry = Mapping[str, object]

# What text of a model's can make a scorer raise: it was written for answers of the right form.
_CHOKES = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


class _Generator(Protocol):
    def __getitem__(self, index: int) -> _Entry: ...

    def score_answer(self, answer: str, entry: _Entry) -> float: ...


class ReasoningGym(SingleTurnEnv):
    """Questions of one generator of the reasoning-gym library, scored by the library itself.

    generator: its name there. chance: the declared chance_score. Partial credit is the library's.
    Question n of a split is drawn from its seed + n; what the test asks is left out of the training split.

    Raises:
        UserError: the library is not installed, or has no such generator.
    """

    def __init__(self, generator: str, chance: float = 0.0) -> None:
        super().__init__()
        self.generator = generator
        self.chance_score = chance

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions of a split."""
        return _tasks(self.generator, split)

    def grade(self, task: Task, answer: str) -> float:
        """The library's own score; an answer that its scorer cannot read is worth 0.0."""
        questions = _questions(self.generator, task.split)
        number = task.metadata["number"]
        assert isinstance(number, int)
        try:
            return float(questions.score_answer(answer.strip(), questions[number]))
        except _CHOKES:
            return 0.0


@lru_cache(maxsize=128)
def _questions(generator: str, split: str) -> _Generator:
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            f"the generator `{generator}` needs the package reasoning-gym; "
            "install it with `pip install 'agentrl[reasoning-gym]'`."
        ) from None
    try:
        made: _Generator = reasoning_gym.create_dataset(
            generator, seed=_SEEDS[split], size=NUM_QUESTIONS[split]
        )
    except ValueError as error:
        raise UserError(f"reasoning-gym makes no `{generator}`: {error}.") from None
    return made


@lru_cache(maxsize=128)
def _tasks(generator: str, split: str) -> tuple[Task, ...]:
    seen = {task.prompt for task in _tasks(generator, "test")} if split == "train" else set()
    questions = _questions(generator, split)
    found: dict[tuple[Message, ...], Task] = {}
    for number in range(NUM_QUESTIONS[split]):
        entry = questions[number]
        prompt = (Message("user", str(entry["question"])),)
        if prompt not in seen:
            id = f"{split}-{number}"
            found.setdefault(prompt, Task(id, prompt, str(entry["answer"]), {"number": number}, split))
    return tuple(found.values())
