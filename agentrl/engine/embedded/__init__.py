"""The embedded engine: continuous batching over Llama and Qwen3 weights, in this process."""

from agentrl.engine.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
