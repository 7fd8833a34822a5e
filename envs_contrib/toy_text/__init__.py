"""Gymnasium's toy-text environments as text: FrozenLake, CliffWalking, Taxi and Blackjack."""

from envs_contrib.toy_text.blackjack import Blackjack
from envs_contrib.toy_text.grids import CliffWalking, FrozenLake, Taxi

__all__ = ["Blackjack", "CliffWalking", "FrozenLake", "Taxi"]
