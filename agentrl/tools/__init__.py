"""Tools: typed functions with a JSON Schema, and the ones that come with the gym."""

from agentrl.tools.base import Tool, ToolFunction, tool

__all__ = ["Tool", "ToolFunction", "tool"]
