"""The embedded engine: continuous batching over Llama, Qwen2 and Qwen3 weights, in this process."""

from agentrl.engine.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
