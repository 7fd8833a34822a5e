"""Repositories: small programs in four languages to repair, each with a history, graded by hidden tests."""

from envs_contrib.repositories.env import Repositories
from envs_contrib.repositories.harness import RepositoriesHarness

__all__ = ["Repositories", "RepositoriesHarness"]
