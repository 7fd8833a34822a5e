"""The environment: sums, answered by one agent and judged by another."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product

from agentrl import JointStep, Limits, Message, MultiAgentEnv, Script, Task, say

SOLVER, CRITIC = "solver", "critic"
VERDICTS = ("right", "wrong")
Shown = Mapping[str, tuple[Message, ...]]
LARGEST = 9
WRONG_ANSWERS = 0.5
"""How often the scripted solver is wrong at first, so that a critic has something to find."""


class SolverCritic(MultiAgentEnv):
    """The solver adds two digits, the critic says whether that is right; if not, the solver answers again.

    The agents act in turns. The solver is paid for its last answer, the critic for its judgement of the
    first: neither gains by misleading the other. Both can be one model, which then learns two roles; each is
    compared with its own role in the sibling episodes.
    """

    possible_agents = (SOLVER, CRITIC)
    limits = Limits(max_turns=2, max_tokens=128)

    def __init__(self) -> None:
        super().__init__()
        self.task: Task | None = None
        self.is_right = False
        self.judgement: float | None = None

    def chance_score_of(self, agent: str) -> float:
        """A critic is right half the time by saying anything."""
        return 0.5 if agent == CRITIC else 0.05

    def tasks(self, split: str) -> Sequence[Task]:
        """The sums of a split; none is in two."""
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
        answer = actions[SOLVER].text.strip()
        self.is_right = answer == self.task.answer
        if self.judgement is not None:
            return JointStep.finished({SOLVER: float(self.is_right)})
        self.acting = (CRITIC,)
        asked = f"{self.task.metadata['sum']} = {answer[:20]}: right or wrong?"
        return JointStep.going({CRITIC: (Message("user", asked),)})

    def _judged(self, verdict: str) -> JointStep:
        self.judgement = float(verdict == VERDICTS[not self.is_right])
        if verdict != "wrong":
            return JointStep.finished({SOLVER: float(self.is_right), CRITIC: self.judgement})
        self.acting = (SOLVER,)
        again = (Message("user", "The critic says: wrong. Answer again."),)
        return JointStep.going({SOLVER: again}, {CRITIC: self.judgement})

    def expert(self, task: Task, agent: str, shown: str) -> Script:
        """The solver knows the sum, the critic adds it up."""
        if agent == SOLVER:
            while True:
                yield say(task.answer or "")
        yield say(VERDICTS[f"= {task.answer}:" not in shown])

    def demonstrator(self, task: Task, agent: str, shown: str, rng: random.Random) -> Script:
        """A solver that is often a little off, and a critic that guesses."""
        del shown
        if agent == SOLVER:
            while True:
                off = rng.choice((-1, 1)) if rng.random() < WRONG_ANSWERS else 0
                yield say(str(int(task.answer or 0) + off))
        yield say(rng.choice(VERDICTS))

    def opponent(self, task: Task, agent: str, shown: str, rng: random.Random) -> Script:
        """An expert critic, and a solver that is off half the time."""
        if agent == CRITIC:
            return self.expert(task, agent, shown)
        return self.demonstrator(task, agent, shown, rng)

    def corpus(self) -> Iterable[str]:
        """Everything that is said."""
        for task in self.tasks("train"):
            yield from (message.text for message in task.prompt)
            yield f"{task.metadata['sum']} = {task.answer}: right or wrong?"
        yield "The critic says: wrong. Answer again."
        yield from VERDICTS


@lru_cache(maxsize=1)
def _tasks() -> Mapping[str, tuple[Task, ...]]:
    sums = [*product(range(1, LARGEST + 1), repeat=2)]
    random.Random(0).shuffle(sums)
    held_out = len(sums) // 5
    parts = {"test": sums[:held_out], "train": sums[held_out:]}
    return {
        split: tuple(_task(f"{split}-{n}", split, a, b) for n, (a, b) in enumerate(part))
        for split, part in parts.items()
    }


def _task(id: str, split: str, a: int, b: int) -> Task:
    asked = f"{a} + {b}"
    prompt = (Message("user", f"What is {asked}? Answer with the number alone."),)
    return Task(id, prompt, str(a + b), {"sum": asked}, split)
