"""A shell in the sandbox: programs of this machine, and files that stay for an episode."""

from agentrl.tools.shell.tool import Shell, ShellTool

__all__ = ["Shell", "ShellTool"]
