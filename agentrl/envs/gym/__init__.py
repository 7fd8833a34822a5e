"""Gymnasium, both ways: environments of ours as its own, and its own as environments of ours."""

from agentrl.envs.gym.adopted import GymEnv
from agentrl.envs.gym.face import GymnasiumFace
from agentrl.envs.gym.spaces import TextSpace

__all__ = ["GymEnv", "GymnasiumFace", "TextSpace"]
