"""Terminal: small repositories to repair in a shell, graded by tests that the agent cannot see or change."""

from envs_contrib.terminal.env import Terminal

__all__ = ["Terminal"]
