"""Python that a model wrote, run in a sandbox."""

from agentrl.tools.python.namespaces import SandboxRefusedError
from agentrl.tools.python.sessions import PythonResult
from agentrl.tools.python.tool import PythonInterpreter, PythonTool

__all__ = ["PythonInterpreter", "PythonResult", "PythonTool", "SandboxRefusedError"]
