"""A world that fails at its second turn: `Broken-v0`."""

from agentrl import Env, Task, register


class Broken(Env):
    """Fails where it is told `twice`."""

    def tasks(self, split):
        return [Task.ask(f"{split}-1", "Say it.")]

    async def reset(self, task, *, seed):
        return task.prompt, {}

    async def step(self, action):
        if action.text == "twice":
            raise RuntimeError("the world is gone")
        return "Again.", None, False, False, {}


register("Broken-v0", Broken)
