"""ReTool: math problems with Python in a sandbox whose state stays (arXiv:2504.11536)."""

from envs_contrib.retool.env import ReTool

__all__ = ["ReTool"]
