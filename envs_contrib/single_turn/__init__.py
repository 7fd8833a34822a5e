"""An environment for questions of custom data, with one turn."""

from envs_contrib.single_turn.env import SingleTurn

__all__ = ["SingleTurn"]
