"""The game as text, and perfect play."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

from agentrl import Limits, PettingZooEnv

Board = tuple[int, ...]
"""Nine cells, column by column as PettingZoo numbers them: 0 empty, 1 own, 2 the other's."""

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_RULES = """\
Tic-tac-toe: get three of your marks (X) in a row, a column or a diagonal before the other (O) does.
The cells are numbered; answer with the number of an empty one."""


class TicTacToe(PettingZooEnv):
    """Get three in a row against the other player. A win is worth 1, a draw 0.5, a loss 0.

    The scores are exact expectations against a script that takes any empty cell, by recursion over all games:
    of perfect play, and of taking any empty cell. The first player has the better chance.
    """

    limits = Limits(max_turns=9, max_tokens=1024)

    def __init__(self) -> None:
        super().__init__(
            "pettingzoo.classic.tictactoe_v3", rules=_RULES, describe=_as_text, returns=(-1.0, 1.0)
        )

    def expert_score_of(self, agent: str) -> float:
        """The score of perfect play against random play."""
        return _expected(_EMPTY, moves_first=agent == self.possible_agents[0], plays_well=True)

    def chance_score_of(self, agent: str) -> float:
        """The score of random play against random play."""
        return _expected(_EMPTY, moves_first=agent == self.possible_agents[0], plays_well=False)

    def policy(self, observation: object, agent: str) -> int:
        """The action of the greatest minimax value; of several, the first."""
        del agent
        board = _board(observation)
        return max(_free(board), key=lambda cell: -_worth(_turned(_marked(board, cell))))


_EMPTY: Board = (0,) * 9


def _board(observation: object) -> Board:
    planes = cast(Mapping[str, list[list[list[int]]]], observation)["observation"]
    cells = [planes[column][row] for column in range(3) for row in range(3)]
    return tuple(1 if own else 2 if other else 0 for own, other in cells)


def _as_text(observation: object, agent: str) -> str:
    del agent
    marks = [{0: str(cell), 1: "X", 2: "O"}[mark] for cell, mark in enumerate(_board(observation))]
    return "\n".join(" ".join(marks[row + 3 * column] for column in range(3)) for row in range(3))


def _free(board: Board) -> list[int]:
    return [cell for cell, mark in enumerate(board) if not mark]


def _marked(board: Board, cell: int) -> Board:
    return (*board[:cell], 1, *board[cell + 1 :])


def _turned(board: Board) -> Board:
    """The same board from the other player's side."""
    return tuple({0: 0, 1: 2, 2: 1}[mark] for mark in board)


def _has_lost(board: Board) -> bool:
    return any(all(board[cell] == 2 for cell in line) for line in _LINES)


@cache
def _worth(board: Board) -> int:
    """The minimax value of the board for the player to move: 1, 0 or -1."""
    if _has_lost(board):
        return -1
    return max((-_worth(_turned(_marked(board, cell))) for cell in _free(board)), default=0)


@cache
def _expected(board: Board, *, moves_first: bool, plays_well: bool) -> float:
    """The expected score of a player against random play; `moves_first`: it moves next."""
    if _has_lost(board):
        return 0.0 if moves_first else 1.0
    free = _free(board)
    if not free:
        return 0.5
    if moves_first and plays_well:
        free = [max(free, key=lambda cell: -_worth(_turned(_marked(board, cell))))]
    after = [
        _expected(_turned(_marked(board, cell)), moves_first=not moves_first, plays_well=plays_well)
        for cell in free
    ]
    return sum(after) / len(after)
