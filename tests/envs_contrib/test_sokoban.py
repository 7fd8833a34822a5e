"""Sokoban: the rules of pushing, rooms that can be solved, and shortest solutions."""

from __future__ import annotations

from itertools import product

import pytest

from agentrl import ScriptedAgent, call, make, play
from envs_contrib.sokoban.levels import MOVES, Room, solution, solvable_room

SHAPES = [(4, 1, 12), (5, 2, 30)]


def room_of(text):
    """A room from its picture, without the walls around it."""
    cells = {(r, c): sign for r, row in enumerate(text.split()) for c, sign in enumerate(row)}
    return Room(
        frozenset(cell for cell, sign in cells.items() if sign != "#"),
        frozenset(cell for cell, sign in cells.items() if sign in "o*+"),
        frozenset(cell for cell, sign in cells.items() if sign in "$*"),
        next(cell for cell, sign in cells.items() if sign in "@+"),
    )


@pytest.mark.parametrize(
    ("before", "move", "after"),
    [
        ("@.. ...", "right", ".@. ..."),
        ("@.. ...", "up", "@.. ..."),
        ("@#. ...", "right", "@#. ..."),
        ("@$. o..", "right", ".@$ o.."),
        ("@$# o..", "right", "@$# o.."),
        ("@$$ oo.", "right", "@$$ oo."),
        (".$@ o..", "right", ".$@ o.."),
        ("@$o ...", "right", ".@* ..."),
        ("+$. .$.", "right", "o@$ .$."),
        ("@*. ..o", "right", ".+$ ..o"),
        ("... @.. $.. o..", "down", "... ... @.. *.."),
    ],
)
def test_a_push_moves_one_box_unless_a_wall_or_a_box_is_behind_it(before, move, after):
    assert room_of(before).moved(move) == room_of(after)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_room_is_solved_by_as_many_moves_as_promised_and_begins_unsolved(shape):
    _, num_boxes, max_moves = shape
    rooms = [solvable_room(seed, *shape) for seed in range(40)]
    assert len(set(rooms)) == len(rooms)
    for room in rooms[:5]:
        assert len(room.boxes) == len(room.goals) == num_boxes
        assert not room.is_solved
        moves = solution(room)
        assert 0 < len(moves) <= max_moves
        after = room
        for move in moves:
            after = after.moved(move)
        assert after.is_solved


def test_a_solution_is_a_shortest_one():
    room = next(
        room
        for room in (solvable_room(seed, 4, 1, 12) for seed in range(50))
        if 4 <= len(solution(room)) <= 6
    )
    for length in range(len(solution(room))):
        for moves in product(MOVES, repeat=length):
            after = room
            for move in moves:
                after = after.moved(move)
            assert not after.is_solved


def test_a_room_that_cannot_be_solved_has_no_solution():
    assert solution(room_of("$.@ ... ..o")) == ()


def test_the_picture_has_walls_around_it():
    assert room_of("@$o ..#").as_text() == "#####\n#@$o#\n#..##\n#####\n#####"


@pytest.mark.parametrize("id", ["SokobanSmall-v0", "Sokoban-v0"])
async def test_the_expert_solves_it_through_the_episode_loop(id):
    env = make(id)
    task = env.tasks("test")[1]
    episode = await play(make(id), ScriptedAgent(env.expert(task)), task)
    assert (episode.ending, episode.total_of()) == ("completed", 1.0)
    first = episode.turns[0].observation[0].text
    assert all(f"{sign} " in first for sign in "#.o$*@+")
    await env.reset(task, seed=0)
    step = await env.step(call("act", action="fly"))
    assert (step.reward, env.counts["invalid_moves"]) == (None, 1)
