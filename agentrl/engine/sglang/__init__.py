"""SGLang by its address: the protocol, and the policy that speaks it. Free of torch."""

from agentrl.engine.sglang.client import SGLangPolicy

__all__ = ["SGLangPolicy"]
