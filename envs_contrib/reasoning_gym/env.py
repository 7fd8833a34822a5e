"""The environment of one generator: the library makes the questions and scores the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from agentrl import Message, SingleTurnEnv, Task, UserError

NUM_QUESTIONS: Mapping[str, int] = {"train": 1000, "test": 200}
_SEEDS: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_Entry = Mapping[str, object]

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


class ReasoningGym(SingleTurnEnv):
    """Questions of one generator of the reasoning-gym library, scored by the library itself.

    generator: its name in the library. chance: the declared chance_score. Partial credit is the library's.
    Question n of a split is drawn from its seed + n; the training split has no question of the test split.

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
        """The library's own score; 0.0 for an answer that its scorer cannot parse."""
        questions = _questions(self.generator, task.split)
        number = task.metadata["number"]
        assert isinstance(number, int)
        try:
            return float(questions.score_answer(answer.strip(), questions[number]))
        except _SCORER_ERRORS:
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
        dataset: _Generator = reasoning_gym.create_dataset(
            generator, seed=_SEEDS[split], size=NUM_QUESTIONS[split]
        )
    except ValueError as error:
        raise UserError(f"reasoning-gym makes no `{generator}`: {error}.") from None
    return dataset


@lru_cache(maxsize=128)
def _tasks(generator: str, split: str) -> tuple[Task, ...]:
    test_prompts = {task.prompt for task in _tasks(generator, "test")} if split == "train" else set()
    questions = _questions(generator, split)
    by_prompt: dict[tuple[Message, ...], Task] = {}
    for number in range(NUM_QUESTIONS[split]):
        entry = questions[number]
        prompt = (Message("user", str(entry["question"])),)
        if prompt not in test_prompts:
            id = f"{split}-{number}"
            by_prompt.setdefault(prompt, Task(id, prompt, str(entry["answer"]), {"number": number}, split))
    return tuple(by_prompt.values())
