"""Tools: typed functions with a JSON Schema, and the ones that come with the gym."""

from agentrl.tools.base import Tool, ToolFunction, tool
from agentrl.tools.calculator import calculate
from agentrl.tools.search import Bm25Index

__all__ = ["Bm25Index", "Tool", "ToolFunction", "calculate", "tool"]
