"""The taskset of a world that fails."""

import worlds

from agentrl.envs.export.on_tasksets import EpisodeEnv, EpisodeHarness, EpisodeTaskset

__all__ = ["BrokenTaskset", "EpisodeEnv", "EpisodeHarness", "worlds"]


class BrokenTaskset(EpisodeTaskset):
    """Its tasks."""

    env_id = "Broken-v0"
