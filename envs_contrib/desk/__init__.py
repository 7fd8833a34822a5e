"""Desk: the diary of a room, in which the agent books an hour; another booking may be in the way."""

from envs_contrib.desk.env import Desk

__all__ = ["Desk"]
