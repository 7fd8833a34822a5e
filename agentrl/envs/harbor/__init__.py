"""Tasks in Harbor's format, of which Terminal-Bench 2 is one, without an image."""

from agentrl.envs.harbor.env import HarborTasks

__all__ = ["HarborTasks"]
