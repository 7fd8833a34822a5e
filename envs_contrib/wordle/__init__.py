"""Wordle: find a word of five letters in six guesses."""

from envs_contrib.wordle.env import Wordle

__all__ = ["Wordle"]
