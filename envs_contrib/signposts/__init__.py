"""Signposts: walk from picture to picture, and say at the end what was in two of them."""

from envs_contrib.signposts.env import Signposts

__all__ = ["Signposts"]
