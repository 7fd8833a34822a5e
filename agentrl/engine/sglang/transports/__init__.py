"""Transports of weights to servers: shared memory, a process group, or directories."""

from agentrl.engine.sglang.transports.base import Delivery, Loaded, Transport

__all__ = ["Delivery", "Loaded", "Transport"]
