"""The environment: pictures as observations, directions as messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from agentrl import Env, Image, Limits, Message, Script, Step, Task, Text, say
from agentrl.tools import JSON, inline
from envs_contrib.measures import MEASURES
from envs_contrib.signposts.picture import COLOURS, DIRECTIONS, FORMS, arrow, form

NUM_TASKS: Mapping[str, int] = {"train": 1000, "test": 200}
NUM_ARROWS = (2, 5)
"""The fewest and the most arrows of a walk."""
_LONGEST_ANSWER = 200

_RULES = f"""\
You walk from sign to sign. Each picture is a sign. An arrow says where the next sign is: write its
direction on a map, whose top is north, in one word: {", ".join(DIRECTIONS)}. Where the walk ends there is
no arrow but a form ({", ".join(FORMS)}). Then write two words: the colour of the first arrow of the walk
({", ".join(COLOURS)}), and the form. A wrong direction ends the walk.
This is the first sign."""
_NEXT = "This is the next sign."


class _Walk(NamedTuple):
    """directions, colours: of the arrows, in their order. form, colour: of what is at the end."""

    directions: tuple[str, ...]
    colours: tuple[str, ...]
    form: str
    colour: str


class Signposts(Env):
    """Follow the arrows of two to five pictures, and name the first one's colour and the last one's form.

    Each observation is a picture, so it needs a model that sees, behind a chat endpoint. Whoever walks to the
    end and names both has solved it, which is worth 1; all else is worth 0. What is no direction, where one
    is asked for, is counted in `invalid_moves`. No walk is in two splits.

    seed: of the walks.
    """

    group = "games"
    limits = Limits(max_turns=NUM_ARROWS[1] + 1, max_tokens=8192)
    rewards = MEASURES

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self._walk: _Walk | None = None
        self._place = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """The walks of a split."""
        return _tasks(self.seed)[split]

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin the walk of the task, at its first sign; `seed` has no effect."""
        self.seed_rng(seed)
        self._walk, self._place = _walks(self.seed)[task.id], 0
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Go on to the next sign, or end."""
        walk = self._walk
        assert walk is not None, "reset() comes first"
        words = action.text[:_LONGEST_ANSWER].lower().split()
        said = [word.strip(".,;:!\"'()*`") for word in words]
        if self._place == len(walk.directions):
            return Step.finished(reward=float(said == [walk.colours[0], walk.form]))
        if said != [walk.directions[self._place]]:
            self.counts["invalid_moves"] += len(said) != 1 or said[0] not in DIRECTIONS
            return Step.finished(reward=0.0)
        self._place += 1
        return Step.going(Message("user", (Text(_NEXT), _picture(walk, self._place))))

    @inline
    def save_state(self) -> Mapping[str, JSON]:
        """How far the walk is."""
        return {"_place": self._place}

    def expert(self, task: Task) -> Script:
        """Walk to the end."""
        walk = _walks(self.seed)[task.id]
        for direction in walk.directions:
            yield say(direction)
        yield say(f"{walk.colours[0]} {walk.form}")

    def corpus(self) -> Iterable[str]:
        """The rules."""
        yield _RULES
        yield _NEXT


def _picture(walk: _Walk, place: int) -> Image:
    """The sign at a place of a walk: the same whenever it is drawn."""
    rng = random.Random(f"{walk} {place}")
    if place == len(walk.directions):
        return form(walk.form, walk.colour, rng)
    return arrow(walk.directions[place], walk.colours[place], rng)


@lru_cache(maxsize=8)
def _walks(seed: int) -> Mapping[str, _Walk]:
    """The walk of each task, by its id."""
    rng = random.Random(seed)
    total = sum(NUM_TASKS.values())
    walks: dict[_Walk, None] = {}
    while len(walks) < total:
        number = NUM_ARROWS[0] + len(walks) % (NUM_ARROWS[1] - NUM_ARROWS[0] + 1)
        directions = tuple(rng.choices(DIRECTIONS, k=number))
        colours = tuple(rng.choices(tuple(COLOURS), k=number))
        walks[_Walk(directions, colours, rng.choice(FORMS), rng.choice(tuple(COLOURS)))] = None
    ids = [f"{split}-{number}" for split, count in NUM_TASKS.items() for number in range(count)]
    return dict(zip(ids, walks, strict=True))


@lru_cache(maxsize=8)
def _tasks(seed: int) -> Mapping[str, tuple[Task, ...]]:
    def task(id: str, walk: _Walk) -> Task:
        prompt = (Message("user", (Text(_RULES), _picture(walk, 0))),)
        facts: dict[str, JSON] = {"arrows": len(walk.directions)}
        return Task(id, prompt, f"{walk.colours[0]} {walk.form}", facts, id.partition("-")[0])

    tasks = [task(id, walk) for id, walk in _walks(seed).items()]
    return {split: tuple(task for task in tasks if task.split == split) for split in NUM_TASKS}
