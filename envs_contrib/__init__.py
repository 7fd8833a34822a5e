"""Contributed environments. They import nothing but the public surface of `agentrl`."""
