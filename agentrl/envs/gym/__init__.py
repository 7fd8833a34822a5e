"""Gymnasium in both directions: agentrl's environments as gymnasium.Env, and gymnasium.Env as agentrl's."""

from agentrl.envs.gym.adopted import GymEnv
from agentrl.envs.gym.face import GymnasiumFace
from agentrl.envs.gym.spaces import TextSpace

__all__ = ["GymEnv", "GymnasiumFace", "TextSpace"]
