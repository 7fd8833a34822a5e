"""Questions of your own data, answered in one turn."""

from envs_contrib.single_turn.env import SingleTurn

__all__ = ["SingleTurn"]
