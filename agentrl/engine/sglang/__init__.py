"""SGLang servers by their address: the protocol, and the policy that uses it. Free of torch."""

from agentrl.engine.sglang.client import SGLangPolicy

__all__ = ["SGLangPolicy"]
