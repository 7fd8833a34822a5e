"""SearchR1: questions that are answered with a search engine, in Search-R1's protocol (arXiv:2503.09516)."""

from envs_contrib.search_r1.env import SearchR1

__all__ = ["SearchR1"]
