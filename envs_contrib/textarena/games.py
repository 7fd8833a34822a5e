"""The table of games. It imports nothing, so that ids are listed without TextArena.

Left out are games whose opponent or jury is a language model (GuessWho, TwentyQuestions), that download a
word list (Hangman, WordLadder, WordSearch, Wordle), and that are the same in every episode (Countdown,
Cryptarithm, PegJump, TowerOfHanoi): there the training and the test tasks would be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Game(NamedTuple):
    """name: its id in TextArena. max_turns: of an episode. chance: the mean score of random answers.

    expert_score: of the expert, where there is one. partial: whether a part of a game counts.
    """

    name: str
    max_turns: int
    chance: float = 0.0
    expert_score: float = 1.0
    partial: bool = False


GAMES: Mapping[str, Game] = {
    "2048": Game("2048-v0-super-easy", 200),
    "Bandit": Game("Bandit-v0", 24),
    "Blackjack": Game("Blackjack-v0", 40, partial=True),
    "Crosswords": Game("Crosswords-v0", 40),
    "FifteenPuzzle": Game("FifteenPuzzle-v0", 200),
    "FrozenLake": Game("FrozenLake-v0-random", 40),
    "GuessTheNumber": Game("GuessTheNumber-v0", 12),
    "GuessTheNumberHard": Game("GuessTheNumber-v0-hardcore", 12),
    "LightsOut": Game("LightsOut-v0", 24),
    "LogicPuzzle": Game("LogicPuzzle-v0", 60),
    "Mastermind": Game("Mastermind-v0", 24),
    "MastermindHard": Game("Mastermind-v0-hard", 32),
    "Minesweeper": Game("Minesweeper-v0-small", 60),
    "RushHour": Game("RushHour-v0", 60),
    "Secretary": Game("Secretary-v0", 12),
    "Slitherlink": Game("Slitherlink-v0", 80),
    "Sudoku": Game("Sudoku-v0-very-easy", 60),
    "ThreeCardMonte": Game("ThreeCardMonte-v0", 4, 1 / 3),
}

_CLASS = "envs_contrib.textarena.env:TextArena"

FAMILY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    f"TextArena-{name}-v0": (
        _CLASS,
        {"game": game.name, **dict(zip(Game._fields[1:], game[1:], strict=True))},
    )
    for name, game in GAMES.items()
}
"""By id: the class of the environment and its arguments (the entry point `TextArena-*-v0`)."""
