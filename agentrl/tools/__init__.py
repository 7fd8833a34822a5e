"""Tools: typed functions with a JSON Schema, and the ones that come with the gym."""

from agentrl.tools.arguments import ArgumentPolicy, ArgumentsRejected
from agentrl.tools.base import Tool, ToolFunction, tool
from agentrl.tools.calculator import calculate
from agentrl.tools.running import inline, is_inline, run
from agentrl.tools.search import Bm25Index

__all__ = [
    "ArgumentPolicy",
    "ArgumentsRejected",
    "Bm25Index",
    "Tool",
    "ToolFunction",
    "calculate",
    "inline",
    "is_inline",
    "run",
    "tool",
]
