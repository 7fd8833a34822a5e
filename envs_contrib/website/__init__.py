"""Website: the pages of a small shop, to read, to fill in and to buy from, without a browser."""

from envs_contrib.website.env import Website

__all__ = ["Website"]
