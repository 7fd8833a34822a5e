"""The environment: guesses as messages, marks as their answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from agentrl import Env, Limits, Message, Script, Step, Tags, Task, UserError, say
from agentrl.tools import JSON, inline
from envs_contrib.measures import MEASURES
from envs_contrib.wordle.game import RIGHT, best_guess, consistent, marks
from envs_contrib.wordle.words import WORDS

LENGTH = 5
GUESSES = 6
NUM_TEST = 200
"""Words that are the answers of the test split."""

_RULES = f"""\
Find a secret word of {LENGTH} letters in {GUESSES} guesses. A guess is a common English word of {LENGTH}
letters. Each letter of it gets a mark: G in the right place, Y elsewhere in the word, X not in the word,
or not again. Write nothing but the word. A guess that is no such word is lost."""
_NO_WORD = f"That is no word of the list. The guess is lost; write one common word of {LENGTH} letters."


class Wordle(Env):
    """Find a secret word of five letters in six guesses, from the marks of their letters.

    Solving is worth 1, however many guesses it takes. A guess that is no word of the list costs a turn, earns
    nothing and is counted in `invalid_moves`; `solved` and `invalid_moves` are parts of a verdict.
    No answer of the test split is one of the training split; any of them may be guessed.

    num_words: how many of the words are used, for small models.

    Raises:
        UserError: there are not so many words, or too few for two splits.
    """

    group = "games"
    limits = Limits(max_turns=GUESSES, max_tokens=1024)
    dialect = Tags(answer="guess", result="marks")
    rewards = MEASURES

    def __init__(self, num_words: int = len(WORDS)) -> None:
        super().__init__()
        if not 10 <= num_words <= len(WORDS):
            raise UserError(f"Wordle has {len(WORDS)} words, got num_words = {num_words}; use 10 at least.")
        self.words = WORDS[:num_words]
        self._answer = ""
        self._guesses = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """One task for each word that is an answer in a split."""
        return _tasks(len(self.words))[split]

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin with the word of the task; `seed` has no effect."""
        self.seed_rng(seed)
        self._answer, self._guesses = task.answer or "", 0
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Mark a guess; the sixth one ends the game."""
        guess = "" if action.tool_calls else action.text[: 10 * LENGTH].strip(" \n\t.[]\"'").lower()
        self._guesses += 1
        if guess == self._answer:
            return Step.finished(Message("user", self._marked(guess)), reward=1.0)
        if guess in _dictionary(len(self.words)):
            answer = Message("user", self._marked(guess))
        else:
            self.counts["invalid_moves"] += 1
            answer = Message("user", _NO_WORD)
        return Step.finished(answer, reward=0.0) if self._guesses == GUESSES else Step.going(answer)

    @inline
    def save_state(self) -> Mapping[str, JSON]:
        """The number of guesses."""
        return {"_guesses": self._guesses}

    def expert(self, task: Task) -> Script:
        """Guess only what the marks allow, and few words that are not told apart."""
        del task
        candidates: Sequence[str] = self.words
        guess = _opening(len(self.words))
        while True:
            seen = (yield say(guess)).split("\n")[-1].replace(" ", "")
            candidates = consistent(candidates, guess, seen)
            if seen == RIGHT * LENGTH:
                return
            guess = best_guess(self.words, candidates)

    def corpus(self) -> Iterable[str]:
        """The rules, and every word and mark letter by letter, so that a letter is a token."""
        yield _RULES
        yield _NO_WORD
        for word in self.words:
            yield "\n".join(word)
            yield "\n".join(f"{letter.upper()} G X Y" for letter in word)

    def _marked(self, guess: str) -> str:
        return f"{' '.join(guess)}\n{' '.join(marks(guess, self._answer))}"


@lru_cache(maxsize=8)
def _dictionary(num_words: int) -> frozenset[str]:
    return frozenset(WORDS[:num_words])


@lru_cache(maxsize=8)
def _opening(num_words: int) -> str:
    return best_guess(WORDS[:num_words], WORDS[:num_words])


@lru_cache(maxsize=8)
def _tasks(num_words: int) -> Mapping[str, tuple[Task, ...]]:
    answers = list(WORDS[:num_words])
    random.Random(0).shuffle(answers)
    num_test = min(NUM_TEST, num_words // 4)
    prompt = (Message("user", _RULES),)
    return {
        split: tuple(Task(f"{split}-{n}", prompt, word, {}, split) for n, word in enumerate(words))
        for split, words in {"train": answers[num_test:], "test": answers[:num_test]}.items()
    }
