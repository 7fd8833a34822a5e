"""A level as text: what the agent sees in front of it, and its mission."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from agentrl import GymEnv, Limits, Script, Task
from envs_contrib.measures import MEASURES

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
_RULES = """\
You are in a grid of rooms and see the part of it in front of you. Fulfil the mission. Left and right turn
you where you stand, forward takes a step. Pickup takes the object right in front of you, drop puts it
there. Toggle opens a door or a box right in front of you; a locked door needs the key of its colour in
your hand. Done has no effect."""
_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
_TOKENS_PER_STEP = 96

Image = NDArray[np.uint8]


class _Bot(Protocol):
    def replan(self, action_taken: int | None = None) -> int: ...


class BabyAI(GymEnv):
    """Follow an instruction in a grid world that is partly visible: go, open, pick up, put next to.

    A mission that is fulfilled is worth 1, in however many steps; the parts `solved` and `invalid_moves` of a
    verdict report both. The expert is the bot of minigrid, which plans on what has been visible so far.

    level: the name of the level in minigrid, without prefix and version. max_steps: actions in an episode.
    chance: the declared chance_score. noise: the share of demonstrated actions that are random.

    Raises (when a task begins, or the tools are read):
        MissingExtraError: minigrid is not installed.
        UserError: it has no such level.
    """

    inline = True
    needs = ("minigrid",)
    rewards = MEASURES
    limits = Limits(max_turns=64, max_tokens=8192)

    def __init__(self, level: str, max_steps: int = 64, chance: float = 0.0, noise: float = 0.0) -> None:
        # minigrid pays 1 - 0.9 x steps / max_steps for a mission that is fulfilled: 0.1 and more, up to
        # rounding, and nothing otherwise.
        super().__init__(
            f"envs_contrib.babyai.worlds:BabyAI-{level}-v0",
            actions=ACTIONS,
            rules=_RULES,
            describe=as_text,
            returns=(0.0, 0.09),
            max_steps=max_steps,
        )
        self.chance_score = chance
        self._noise = noise
        self.limits = Limits(max_turns=max_steps, max_tokens=max_steps * _TOKENS_PER_STEP)

    def planner(self, world: object) -> Callable[[object, int | str | None], int]:
        """The bot's next action."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        bot = cast(_Bot, BabyAIBot(world))
        return lambda _, taken: int(bot.replan(None if taken is None else int(taken)))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The bot, in whose place a random step or turn is taken as often as `noise`."""
        own = random.Random(rng.getrandbits(64))
        return self.played(task, lambda action: own.randrange(3) if own.random() < self._noise else action)

    def corpus(self) -> Iterable[str]:
        """The rules, and sentences with all words of missions and observations."""
        yield _RULES
        yield " ".join(ACTIONS)
        for colour, kind in product(_COLOURS, ("ball", "box", "key", "open door", "closed door")):
            yield f"Mission: go to the {colour} {kind}. You see a {colour} {kind} {_place(1, 1)}."
            yield f"Mission: pick up a {kind}. You see an open {colour} {kind} {_place(2, -3)}."
        for steps in range(1, 10):
            yield f"You see a wall {_place(steps, 0)}. You carry a locked door {_place(0, -steps)}."
        yield "open, put the one next to, and then, after you, in front of, on your left, right, behind you"


def as_text(observation: object) -> str:
    """The mission, and every visible object with its place as seen by the agent."""
    seen = cast(Mapping[str, object], observation)
    lines = [f"Mission: {seen['mission']}.", *_sights(cast(Image, seen["image"]))]
    return "\n".join(lines)


def _sights(image: Image) -> Iterator[str]:
    """Objects from near to far, then the walls straight ahead and to both sides.

    image: (columns, rows, 3) with the kind, colour and state of each cell; the agent is at the middle of the
    last row and looks up. What it carries is in its own cell.
    """
    from minigrid.core.constants import IDX_TO_OBJECT

    columns, rows = image.shape[:2]
    here = columns // 2, rows - 1
    kinds = [[IDX_TO_OBJECT[int(cell[0])] for cell in column] for column in image]
    objects = [
        (rows - 1 - row, column - here[0], _named(kinds[column][row], image[column, row]))
        for column in range(columns)
        for row in range(rows)
        if kinds[column][row] in ("door", "key", "ball", "box") and (column, row) != here
    ]
    for forward, right, name in sorted(objects, key=lambda seen: (seen[0] + abs(seen[1]), seen)):
        yield f"You see {name} {_place(forward, right)}."
    for column, row in ((0, -1), (-1, 0), (1, 0)):
        distance = _wall(kinds, here, (column, row))
        if distance:
            yield f"You see a wall {_place(-row * distance, column * distance)}."
    if kinds[here[0]][here[1]] in ("key", "ball", "box"):
        yield f"You carry {_named(kinds[here[0]][here[1]], image[here])}."


def _named(kind: str, cell: Image) -> str:
    from minigrid.core.constants import IDX_TO_COLOR, STATE_TO_IDX

    state = {number: name for name, number in STATE_TO_IDX.items()}[int(cell[2])] if kind == "door" else ""
    words = [word for word in (state, IDX_TO_COLOR[int(cell[1])], kind) if word]
    return f"{'an' if words[0] == 'open' else 'a'} {' '.join(words)}"


def _place(forward: int, right: int) -> str:
    """`2 steps forward and 1 step left`."""
    side = "right" if right > 0 else "left"
    parts = [(forward, "forward"), (abs(right), side)]
    return " and ".join(f"{n} step{'s' if n > 1 else ''} {where}" for n, where in parts if n)


def _wall(kinds: list[list[str]], here: tuple[int, int], direction: tuple[int, int]) -> int:
    """Steps to the nearest wall in a direction; 0 = none is visible, or a door is nearer."""
    column, row = here
    for distance in range(1, len(kinds)):
        column, row = column + direction[0], row + direction[1]
        if not (0 <= column < len(kinds) and 0 <= row < len(kinds[0])):
            return 0
        if kinds[column][row] in ("wall", "door"):
            return distance if kinds[column][row] == "wall" else 0
    return 0
