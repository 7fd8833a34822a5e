"""A shell in the sandbox: programs of this machine, and files that stay for an episode."""

from agentrl.tools.shell.program import ProgramResult, SandboxedProgram
from agentrl.tools.shell.tool import Shell, ShellTool

__all__ = ["ProgramResult", "SandboxedProgram", "Shell", "ShellTool"]
