"""The environment: even or odd, answered by one agent and judged by another."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product

from agentrl import JointStep, Limits, Message, MultiAgentEnv, Script, Task, say

SOLVER, CRITIC = "solver", "critic"
ANSWERS = ("even", "odd")
VERDICTS = ("right", "wrong")
NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ida",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pam",
)
WRONG = 0.25
"""How often a demonstration is wrong, so that there is something to find and to learn."""

Shown = Mapping[str, tuple[Message, ...]]
_AGAIN = "The critic says: wrong. Answer again."


class SolverCritic(MultiAgentEnv):
    """The solver says whether a count is even or odd, the critic whether that is right; if not, again.

    The agents act in turns. The solver is paid for its last answer, the critic for its judgement of the
    first: neither gains by misleading the other. Both can be one model, which then learns two roles; each is
    compared with its own role in the sibling episodes.
    """

    possible_agents = (SOLVER, CRITIC)
    chance_score = 0.5
    limits = Limits(max_turns=2, max_tokens=128)

    def __init__(self) -> None:
        super().__init__()
        self.task: Task | None = None
        self.is_right = False
        self.judgement: float | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The counts of a split; nobody has the same in two."""
        return _tasks()[split]

    async def reset(self, task: Task, *, seed: int) -> tuple[Shown, Mapping[str, str]]:
        """Ask the solver."""
        self.seed_rng(seed)
        self.task, self.judgement = task, None
        self.acting = (SOLVER,)
        return {SOLVER: task.prompt}, {}

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Pass on an answer or a judgement, until the solver's last answer."""
        assert self.task is not None
        if CRITIC in actions:
            return self._judged(actions[CRITIC].text.strip().lower())
        answer = actions[SOLVER].text.strip().lower()
        self.is_right = answer == self.task.answer
        if self.judgement is not None:
            return JointStep.finished({SOLVER: float(self.is_right)})
        self.acting = (CRITIC,)
        return JointStep.going({CRITIC: (Message("user", _asked(self.task, answer)),)})

    def _judged(self, verdict: str) -> JointStep:
        self.judgement = float(verdict == VERDICTS[not self.is_right])
        if verdict != "wrong":
            return JointStep.finished({SOLVER: float(self.is_right), CRITIC: self.judgement})
        self.acting = (SOLVER,)
        return JointStep.going({SOLVER: (Message("user", _AGAIN),)}, {CRITIC: self.judgement})

    def expert(self, task: Task, agent: str, shown: str) -> Script:
        """Both know which counts are even."""
        if agent == SOLVER:
            while True:
                yield say(task.answer or "")
        yield say(VERDICTS[shown != _asked(task, task.answer or "")])

    def demonstrator(self, task: Task, agent: str, shown: str, rng: random.Random) -> Script:
        """A solver and a critic that are often wrong."""
        if agent == SOLVER:
            while True:
                wrong = rng.random() < WRONG
                yield say(next(one for one in ANSWERS if (one == task.answer) != wrong))
        is_wrong = shown != _asked(task, task.answer or "")
        yield say(VERDICTS[is_wrong != (rng.random() < WRONG)])

    def opponent(self, task: Task, agent: str, shown: str, rng: random.Random) -> Script:
        """An expert critic, and a solver that is often wrong."""
        if agent == CRITIC:
            return self.expert(task, agent, shown)
        return self.demonstrator(task, agent, shown, rng)

    def corpus(self) -> Iterable[str]:
        """All prompts, and what is answered."""
        for task in self.tasks("train"):
            yield from (message.text for message in task.prompt)
            yield _asked(task, task.answer or "")
        yield from (_AGAIN, *ANSWERS, *VERDICTS)


def _asked(task: Task, answer: str) -> str:
    """What the critic is shown."""
    return f"{task.prompt[0].text} {answer[:20]}: right or wrong?"


@lru_cache(maxsize=1)
def _tasks() -> Mapping[str, tuple[Task, ...]]:
    counts = [*product(NAMES, range(10))]
    random.Random(0).shuffle(counts)
    held_out = len(counts) // 5
    parts = {"test": counts[:held_out], "train": counts[held_out:]}
    return {
        split: tuple(_task(f"{split}-{n}", split, *count) for n, count in enumerate(part))
        for split, part in parts.items()
    }


def _task(id: str, split: str, name: str, count: int) -> Task:
    prompt = (Message("user", f"{name} has {count} apples. Even or odd?"),)
    return Task(id, prompt, ANSWERS[count % 2], {"count": count}, split)
