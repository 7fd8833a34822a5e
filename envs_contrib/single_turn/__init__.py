"""Environments for prompts of custom data: with one turn, and with tools."""

from envs_contrib.single_turn.env import SingleTurn, Tools

__all__ = ["SingleTurn", "Tools"]
