"""Worlds without a fault, in which a careless check would find one."""

from __future__ import annotations

import random
from typing import Literal

from agentrl import Env, Limits, Message, SingleTurnEnv, Step, Task, call, say, tool
from agentrl.envs.scoring import Reward
from agentrl.tools import inline
from agentrl.types import Ending
from tests.envs.check.broken import WORDS, Good
from tests.envs.check.hacked import ELSEWHERE, knock

CAPITALS = {
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Japan": "Tokyo",
    "Norway": "Oslo",
    "Mali": "Bamako",
}


class Submits(Good):
    """The answer belongs in the argument of a tool, and nowhere else."""

    @tool(inline=True)
    def submit(self, word: str) -> str:
        """Hand the answer in."""
        self.handed_in = word
        return "thank you"

    tools = (*Good.tools, submit)

    @inline
    def reward(self, task, answer):
        return float(getattr(self, "handed_in", "") == task.answer)

    def expert(self, task):
        yield call("submit", word=task.answer)
        yield say("done")


class Choice(SingleTurnEnv):
    """Every prompt contains its answer, as one of four options."""

    chance_score = 0.25

    def tasks(self, split):
        countries = list(CAPITALS)[:3] if split == "train" else list(CAPITALS)[3:]
        return [self.task_of(split, country) for country in countries]

    def task_of(self, split, country):
        rng = random.Random(country)
        right = CAPITALS[country]
        options = [right, *rng.sample([city for city in CAPITALS.values() if city != right], 3)]
        rng.shuffle(options)
        return Task.ask(f"{split}-{country}", f"Capital of {country}: {', '.join(options)}?", right)

    @inline
    def grade(self, task, answer):
        return float(answer == task.answer)


class YesNo(SingleTurnEnv):
    """Short answers that are in prompts by chance."""

    chance_score = 0.5

    def tasks(self, split):
        numbers = range(0, 20) if split == "train" else range(20, 40)
        return [Task.ask(f"{n}", f"Is {n} even, yes or no?", "no" if n % 2 else "yes") for n in numbers]

    @inline
    def grade(self, task, answer):
        return float(answer.strip().lower() == task.answer)


class Sums(SingleTurnEnv):
    """Sometimes the result is one of the summands."""

    def tasks(self, split):
        numbers = range(0, 100) if split == "train" else range(100, 140)
        return [Task.ask(f"{n}", f"What is {n} + {n * n}?", str(n + n * n)) for n in numbers]

    @inline
    def grade(self, task, answer):
        return float(answer == task.answer)


class Luck(Env):
    """A coin decides: the expert's score is below 1, and there is no right answer."""

    expert_score = 0.75
    chance_score = 0.0
    limits = Limits(max_turns=3)

    def tasks(self, split):
        return [Task(f"{split}-{n}", (), metadata={"deal": f"{split}-{n}"}) for n in range(40)]

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        return (Message("user", "Bet red or black."),), {}

    async def step(self, action):
        if action.content.strip() != "a fair bet":
            return Step.going(Message("user", "That is no bet."))
        return Step.finished(reward=float(self.rng.random() < 0.75))

    def expert(self, task):
        yield say("a fair bet")


@inline
def unfinished(episode):
    return float(episode.ending is Ending.TRUNCATED)


class Charges(Good):
    """Losing costs something, and an episode that is truncated costs as much."""

    rewards = (Reward(unfinished, weight=-0.3),)

    def reward(self, task, answer):
        return 1.0 if answer == task.answer else -0.3


class Picks(Good):
    """The schema of its tool holds all answers, as choices."""

    @tool(inline=True)
    def pick(self, word: Literal["Lima", "Nairobi", "Havana", "Tokyo", "Oslo", "Bamako"]) -> str:
        """Choose a city."""
        self.picked = word
        return "thank you"

    tools = (pick,)
    chance_score = 1 / 6

    def tasks(self, split):
        cities = list(CAPITALS.items())[split == "train" :: 2]
        return [Task.ask(f"{split}-{land}", f"Pick the capital of {land}.", city) for land, city in cities]

    @inline
    def reward(self, task, answer):
        return float(getattr(self, "picked", "") == task.answer)

    def expert(self, task):
        yield call("pick", word=task.answer)
        yield say("done")


class Shelf(Good):
    """Reads files of its own, by name; a connection to this host is none to another."""

    @tool(inline=True)
    def read(self, name: str) -> str:
        """Read a file."""
        return {"hidden.txt": "nothing to see"}.get(name.rpartition("/")[2], f"no file {name[:80]}")

    tools = (*Good.tools, read)

    async def reset(self, task, *, seed):
        knock(("127.0.0.1", 9))
        return await super().reset(task, seed=seed)


class Serves(Good):
    """It says that it needs a server."""

    needs = ("server",)

    async def reset(self, task, *, seed):
        knock(ELSEWHERE)
        return await super().reset(task, seed=seed)


class Trails(Good):
    """Its short messages end in an ellipsis, and its hints name other answers."""

    async def step(self, action):
        step = await super().step(action)
        if step.terminated:
            return step
        return step._replace(observation=(*step.observation, Message("user", "Think...")))

    def expert(self, task):
        yield say((yield call("look", word=task.metadata["word"])).split("\n")[0])


class Guesses(Env):
    """Its expert is not told the answer: it finds it, and so does the expert of another task."""

    limits = Limits(max_turns=8)
    task = None

    def tasks(self, split):
        words = WORDS[::2] if split == "train" else WORDS[1::2]
        return [Task.ask(f"{split}-{word}", f"Guess a word, in game {len(word)}.", word) for word in words]

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        self.task = task
        return task.prompt, {}

    async def step(self, action):
        right = action.content == self.task.answer
        return Step.finished(reward=1.0) if right else Step.going(Message("user", "No."))

    def expert(self, task):
        for word in WORDS:
            yield say(word)


class Found(Good):
    """Its expert relies on what it finds, so it raises where another task's word is looked up."""

    async def reset(self, task, *, seed):
        self.word = task.metadata["word"]
        return await super().reset(task, seed=seed)

    def partner(self, word):
        return super().partner(word) if word == getattr(self, "word", word) else "nothing"

    def expert(self, task):
        partner = yield call("look", word=task.metadata["word"])
        assert partner.endswith("ite")
        yield say(partner)


HONEST = (Submits, Choice, YesNo, Sums, Luck, Charges, Picks, Shelf, Serves, Trails, Guesses, Found)
