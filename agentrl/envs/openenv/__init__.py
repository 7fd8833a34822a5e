"""OpenEnv, both sides: a client that plays the environments of its servers, and a server of our own."""

from agentrl.envs.openenv.client import OpenEnv

__all__ = ["OpenEnv"]
