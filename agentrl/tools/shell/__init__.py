"""A shell in the sandbox: programs of this machine, and files that stay for an episode."""

from agentrl.tools.shell.program import SandboxedProgram
from agentrl.tools.shell.tool import PROGRAMS, ProgramResult, Shell, ShellTool

__all__ = ["PROGRAMS", "ProgramResult", "SandboxedProgram", "Shell", "ShellTool"]
