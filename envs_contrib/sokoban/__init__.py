"""Sokoban: push boxes onto goals in small rooms that can be solved."""

from envs_contrib.sokoban.env import Sokoban, SokobanSmall

__all__ = ["Sokoban", "SokobanSmall"]
