"""The taskset of a world that begins with a call and an image."""

import worlds

from agentrl.envs.export.on_tasksets import EpisodeEnv, EpisodeHarness, EpisodeTaskset

__all__ = ["EpisodeEnv", "EpisodeHarness", "PicturedTaskset", "worlds"]


class PicturedTaskset(EpisodeTaskset):
    """Its tasks."""

    env_id = "Pictured-v0"
