"""Tools that an MCP server offers, over the official SDK."""

from agentrl.tools.mcp.toolkit import McpTools

__all__ = ["McpTools"]
