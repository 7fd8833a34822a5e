"""The environment: even or odd, answered by one agent and judged by another."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product

from agentrl import JointStep, Limits, Message, MultiAgentEnv, Script, Task, say
from agentrl.tools import inline

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
"""The rate of wrong answers in demonstrations, so that RL can improve on them."""

Observations = Mapping[str, tuple[Message, ...]]
_AGAIN = "The critic says: wrong. Answer again."


class SolverCritic(MultiAgentEnv):
    """The solver answers whether a count is even or odd; if the critic judges it wrong, it answers again.

    The agents act in turns. The solver is rewarded for its last answer, the critic for its judgement of the
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
        """The counts of a split; no pair of name and count is in two splits."""
        return _tasks()[split]

    async def reset(self, task: Task, *, seed: int) -> tuple[Observations, Mapping[str, str]]:
        """Begin with the question for the solver."""
        self.seed_rng(seed)
        self.task, self.judgement = task, None
        self.acting = (SOLVER,)
        return {SOLVER: task.prompt}, {}

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Forward an answer or a judgement to the other agent, until the solver's last answer."""
        assert self.task is not None
        if CRITIC in actions:
            return self._judge(actions[CRITIC].text.strip().lower())
        answer = actions[SOLVER].text.strip().lower()
        self.is_right = answer == self.task.answer
        if self.judgement is not None:
            return JointStep.finished({SOLVER: float(self.is_right)})
        self.acting = (CRITIC,)
        return JointStep.going({CRITIC: (Message("user", _critic_prompt(self.task, answer)),)})

    def _judge(self, verdict: str) -> JointStep:
        self.judgement = float(verdict == VERDICTS[not self.is_right])
        if verdict != "wrong":
            return JointStep.finished({SOLVER: float(self.is_right), CRITIC: self.judgement})
        self.acting = (SOLVER,)
        return JointStep.going({SOLVER: (Message("user", _AGAIN),)}, {CRITIC: self.judgement})

    @inline
    def save_state(self) -> Mapping[str, float | None]:
        """The judgement, and whether it was to be positive."""
        return {"is_right": self.is_right, "judgement": self.judgement}

    def expert(self, task: Task, agent: str, prompt: str) -> Script:
        """A solver and a critic without errors."""
        if agent == SOLVER:
            while True:
                yield say(task.answer or "")
        yield say(VERDICTS[prompt != _critic_prompt(task, task.answer or "")])

    def demonstrator(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """A solver and a critic that are wrong at the rate WRONG."""
        if agent == SOLVER:
            while True:
                wrong = rng.random() < WRONG
                yield say(next(answer for answer in ANSWERS if (answer == task.answer) != wrong))
        is_wrong = prompt != _critic_prompt(task, task.answer or "")
        yield say(VERDICTS[is_wrong != (rng.random() < WRONG)])

    def opponent(self, task: Task, agent: str, prompt: str, rng: random.Random) -> Script:
        """An expert critic, and a solver that is wrong at the rate WRONG."""
        if agent == CRITIC:
            return self.expert(task, agent, prompt)
        return self.demonstrator(task, agent, prompt, rng)

    def corpus(self) -> Iterable[str]:
        """All prompts and answers."""
        for task in self.tasks("train"):
            yield from (message.text for message in task.prompt)
            yield _critic_prompt(task, task.answer or "")
        yield from (_AGAIN, *ANSWERS, *VERDICTS)


def _critic_prompt(task: Task, answer: str) -> str:
    """The prompt of the critic."""
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
