"""Tools: typed functions with a JSON Schema, and the ones that come with the gym."""

from agentrl.runtime.gate import Gate
from agentrl.tools.arguments import ArgumentPolicy, ArgumentsRejected
from agentrl.tools.base import Tool, ToolFunction, tool
from agentrl.tools.calculator import calculate
from agentrl.tools.python import PythonInterpreter, PythonResult, PythonTool, SandboxRefusedError
from agentrl.tools.registry import make_tool, register_tool, tool_names
from agentrl.tools.running import inline, is_inline, run
from agentrl.tools.search import (
    Bm25Index,
    DenseIndex,
    HybridIndex,
    RemoteSearchTool,
    SearchTool,
)
from agentrl.tools.shared import Held, Shared, release_shared
from agentrl.tools.shell import Shell, ShellTool
from agentrl.tools.toolkit import Toolkit
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

__all__ = [
    "JSON",
    "ArgumentPolicy",
    "ArgumentsRejected",
    "Bm25Index",
    "DenseIndex",
    "Gate",
    "Held",
    "HybridIndex",
    "PythonInterpreter",
    "PythonResult",
    "PythonTool",
    "RemoteSearchTool",
    "SandboxRefusedError",
    "SearchTool",
    "Shared",
    "Shell",
    "ShellTool",
    "Tool",
    "ToolFunction",
    "ToolSchema",
    "Toolkit",
    "calculate",
    "inline",
    "is_inline",
    "make_tool",
    "register_tool",
    "release_shared",
    "run",
    "tool",
    "tool_names",
]
