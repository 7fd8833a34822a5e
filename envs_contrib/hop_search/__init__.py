"""HopSearch: questions of one and two hops over a synthetic knowledge base, with a search tool."""

from envs_contrib.hop_search.env import HopSearch

__all__ = ["HopSearch"]
