"""Rooms by reverse play, and their shortest solutions by breadth-first search.

A room begins solved, with every box on a goal. Pulling boxes away gives a state that pushes lead back from,
so every room can be solved (Taylor and Parberry, Procedural Generation of Sokoban Levels, 2011).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

Cell = tuple[int, int]
"""Row and column."""

MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_CANDIDATES = 12
_WALLS = 0.15


class Room(NamedTuple):
    """floor: all cells without a wall. goals: as many as boxes."""

    floor: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a goal."""
        return self.boxes == self.goals

    def moved(self, move: str) -> Room:
        """The room after a move; the same where a wall or a second box is in the way."""
        ahead, beyond = _shifted(self.player, move), _shifted(self.player, move, 2)
        if ahead not in self.floor:
            return self
        if ahead not in self.boxes:
            return self._replace(player=ahead)
        if beyond not in self.floor or beyond in self.boxes:
            return self
        return self._replace(boxes=self.boxes - {ahead} | {beyond}, player=ahead)

    def as_text(self) -> str:
        """The rows, with walls around them."""
        size = 1 + max(max(cell) for cell in self.floor)
        cells = range(-1, size + 1)
        return "\n".join("".join(self._sign((row, column)) for column in cells) for row in cells)

    def _sign(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        if cell == self.player:
            return "+" if cell in self.goals else "@"
        if cell in self.boxes:
            return "*" if cell in self.goals else "$"
        return "o" if cell in self.goals else "."


@lru_cache(maxsize=4096)
def solvable_room(seed: int, size: int, num_boxes: int, max_moves: int) -> Room:
    """A room of size x size cells that `max_moves` moves can solve; a function of the seed.

    Of several candidates it is the one whose boxes are farthest from the goals.
    """
    rng = random.Random(f"sokoban/{seed}")
    rooms = [_pulled_apart(_solved_room(size, num_boxes, rng), max_moves, rng) for _ in range(_CANDIDATES)]
    return max(rooms, key=_distance)


def _distance(room: Room) -> int:
    """The sum of each box's distance to the goal that is nearest to it."""
    return sum(
        min(abs(row - goal[0]) + abs(column - goal[1]) for goal in room.goals) for row, column in room.boxes
    )


@lru_cache(maxsize=4096)
def solution(room: Room) -> tuple[str, ...]:
    """A shortest sequence of moves that solves a room; empty where it is solved, or cannot be."""
    came_from: dict[Room, tuple[Room, str]] = {}
    queue = deque([room])
    while queue:
        current = queue.popleft()
        if current.is_solved:
            return tuple(_way(current, room, came_from))
        for move in MOVES:
            after = current.moved(move)
            if after not in (current, room) and after not in came_from:
                came_from[after] = current, move
                queue.append(after)
    return ()


def _way(end: Room, begin: Room, came_from: Mapping[Room, tuple[Room, str]]) -> Iterator[str]:
    moves = []
    while end != begin:
        end, move = came_from[end]
        moves.append(move)
    return reversed(moves)


def _solved_room(size: int, num_boxes: int, rng: random.Random) -> Room:
    cells = [(row, column) for row in range(size) for column in range(size)]
    while True:
        floor = frozenset(cell for cell in cells if rng.random() >= _WALLS)
        if len(floor) > 2 * num_boxes + 2 and len(_walks(min(floor), floor)) == len(floor):
            *goals, player = rng.sample(sorted(floor), num_boxes + 1)
            return Room(floor, frozenset(goals), frozenset(goals), player)


def _pulled_apart(room: Room, max_moves: int, rng: random.Random) -> Room:
    """The room after random pulls: the player walks next to a box and takes it one step along.

    Walks and pulls together are `max_moves` at most, so as many moves lead back.
    """
    moves = 0
    while True:
        free = room.floor - room.boxes
        walks = _walks(room.player, free)
        pulls = [
            (box, move)
            for box in sorted(room.boxes)
            for move in MOVES
            if _shifted(box, move, 2) in free
            and moves + walks.get(_shifted(box, move), max_moves) < max_moves
        ]
        if not pulls:
            return room
        box, move = rng.choice(pulls)
        moves += walks[_shifted(box, move)] + 1
        boxes = room.boxes - {box} | {_shifted(box, move)}
        room = room._replace(boxes=boxes, player=_shifted(box, move, 2))


def _walks(begin: Cell, free: frozenset[Cell]) -> dict[Cell, int]:
    """The number of steps to every cell that can be reached without a push."""
    steps, queue = {begin: 0}, deque([begin])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            after = _shifted(cell, move)
            if after in free and after not in steps:
                steps[after] = steps[cell] + 1
                queue.append(after)
    return steps


def _shifted(cell: Cell, move: str, steps: int = 1) -> Cell:
    down, right = MOVES[move]
    return cell[0] + steps * down, cell[1] + steps * right
