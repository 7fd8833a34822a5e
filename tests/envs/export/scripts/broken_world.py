"""A package whose world fails at its second turn."""

from agentrl import Env, Task, register
from agentrl.envs.export.on_tasksets import EpisodeEnv, EpisodeHarness, EpisodeTaskset

__all__ = ["BrokenTaskset", "EpisodeEnv", "EpisodeHarness"]


class Broken(Env):
    """Fails at its second turn."""

    def tasks(self, split):
        return [Task.ask(f"{split}-1", "Say it.")]

    async def reset(self, task, *, seed):
        return task.prompt, {}

    async def step(self, action):
        if action.text == "twice":
            raise RuntimeError("the world is gone")
        return "Again.", None, False, False, {}


register("Broken-v0", Broken)


class BrokenTaskset(EpisodeTaskset):
    """Its tasks."""

    env_id = "Broken-v0"
