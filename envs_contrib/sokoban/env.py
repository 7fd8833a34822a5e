"""The rooms as a world of Gymnasium, and that world as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentrl import GymEnv, Limits
from envs_contrib.measures import MEASURES
from envs_contrib.sokoban.levels import MOVES, Room, solution, solvable_room

GYM_ID = "agentrl-worlds/Sokoban-v0"
_ACTIONS = tuple(MOVES)
_SEEDS = 2**31
_RULES = """\
Push every box onto a goal. You move one cell up, down, left or right; a box right ahead of you is pushed
along, unless a wall or another box is behind it. A box cannot be pulled. The signs: # wall, . floor, o goal,
$ box, * box on a goal, @ you, + you on a goal."""


class SokobanWorld(gymnasium.Env[str, int]):
    """A room for each seed. Solving it ends the episode and is worth 1; moves cost nothing.

    max_steps: moves in an episode. max_moves: those of a solution.
    """

    def __init__(self, size: int, num_boxes: int, max_moves: int, max_steps: int) -> None:
        self.action_space = cast(gymnasium.Space[int], Discrete(len(_ACTIONS)))
        self.observation_space = Text((size + 2) * (size + 3), charset="#.o$*@+\n")
        self._shape = size, num_boxes, max_moves
        self._max_steps, self._steps = max_steps, 0
        self.room: Room | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Begin with the room of the seed; without one with a random room."""
        super().reset(seed=seed, options=options)
        number = int(self.np_random.integers(_SEEDS)) if seed is None else seed
        self.room = solvable_room(number, *self._shape)
        self._steps = 0
        return self.room.as_text(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Move."""
        assert self.room is not None
        self.room = self.room.moved(_ACTIONS[action])
        self._steps += 1
        solved = self.room.is_solved
        return self.room.as_text(), float(solved), solved, self._steps >= self._max_steps and not solved, {}


gymnasium.register(GYM_ID, entry_point=f"{__name__}:SokobanWorld", disable_env_checker=True)


class _HasRoom(Protocol):
    room: Room


class Sokoban(GymEnv):
    """Push two boxes onto goals in a room of 5 x 5 cells, which can be solved in 30 moves at most.

    Solving is worth 1; a box in a corner cannot be moved again. The expert plays a shortest solution. The
    parts `solved` and `invalid_moves` of a verdict report both.
    """

    group = "games"
    inline = True
    rewards = MEASURES
    chance_score = 0.02
    size, num_boxes, max_moves = 5, 2, 30
    limits = Limits(max_turns=50, max_tokens=8192)

    def __init__(self) -> None:
        super().__init__(
            GYM_ID,
            actions=_ACTIONS,
            rules=_RULES,
            describe=str,
            size=self.size,
            num_boxes=self.num_boxes,
            max_moves=self.max_moves,
            max_steps=self.limits.max_turns,
        )

    def planner(self, world: object) -> Callable[[object, object], int]:
        """The moves of a shortest solution."""
        room = cast(_HasRoom, cast(gymnasium.Env[str, int], world).unwrapped).room
        moves = iter(solution(room))
        return lambda *_: _ACTIONS.index(next(moves))


class SokobanSmall(Sokoban):
    """Push one box onto a goal in a room of 4 x 4 cells, which can be solved in 12 moves at most.

    chance_score: random moves solve one room in twenty-four.
    """

    chance_score = 0.05
    size, num_boxes, max_moves = 4, 1, 12
    limits = Limits(max_turns=20, max_tokens=2048)
