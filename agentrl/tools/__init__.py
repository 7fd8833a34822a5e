"""Tools: typed functions with a JSON Schema, and the ones that come with the gym."""

from agentrl.tools.arguments import ArgumentPolicy, ArgumentsRejected
from agentrl.tools.base import Tool, ToolFunction, tool
from agentrl.tools.calculator import calculate
from agentrl.tools.gate import Gate
from agentrl.tools.running import inline, is_inline, run
from agentrl.tools.search import Bm25Index
from agentrl.tools.shared import Held, Shared, release_shared
from agentrl.tools.toolkit import Toolkit

__all__ = [
    "ArgumentPolicy",
    "ArgumentsRejected",
    "Bm25Index",
    "Gate",
    "Held",
    "Shared",
    "Tool",
    "ToolFunction",
    "Toolkit",
    "calculate",
    "inline",
    "is_inline",
    "release_shared",
    "run",
    "tool",
]
