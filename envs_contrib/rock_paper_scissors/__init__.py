"""Rock, paper, scissors over several rounds, between two agents who move at the same time."""

from envs_contrib.rock_paper_scissors.env import RockPaperScissors

__all__ = ["RockPaperScissors"]
