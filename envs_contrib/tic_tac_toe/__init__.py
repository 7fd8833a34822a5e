"""Tic-tac-toe: PettingZoo's own game, with a player that never loses."""

from envs_contrib.tic_tac_toe.env import TicTacToe

__all__ = ["TicTacToe"]
