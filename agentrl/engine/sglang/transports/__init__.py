"""Ways of weights into servers: over shared memory, through a process group, by folders."""

from agentrl.engine.sglang.transports.base import Delivery, Loaded, Transport

__all__ = ["Delivery", "Loaded", "Transport"]
