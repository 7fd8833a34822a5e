"""Levels of BabyAI as text, with the bot that solves them: `BabyAI-LEVEL-v0`.

    pip install 'agentrl[minigrid]'

The names of the levels are those of minigrid (BabyAI, arXiv:1810.08272).
"""

from envs_contrib.babyai.levels import FAMILY

__all__ = ["FAMILY"]
