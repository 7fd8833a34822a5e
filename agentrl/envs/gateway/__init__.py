"""Agents that were not written as environments: for each episode an endpoint, which records all tokens."""

from agentrl.envs.gateway.harness import HarnessEnv

__all__ = ["HarnessEnv"]
