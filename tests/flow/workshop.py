"""A world whose tool runs code in the sandbox, and which saves its state."""

from __future__ import annotations

import random

from agentrl import Reward
from agentrl.tools import PythonTool
from tests.flow.worlds import Bandit


def tossed(episode):
    """0 or 1 by the episode's id: siblings that play alike differ, too, and nothing can be learned."""
    return float(random.Random(episode.id).random() < 0.5)


class Workshop(Bandit):
    """A press takes a moment in the sandbox."""

    rewards = (Reward(tossed),)
    tool = PythonTool(wall_s=30.0, memory_mb=64)

    async def reset(self, task, *, seed):
        self.interpreter = self.tool.interpreter()
        return await super().reset(task, seed=seed)

    async def press(self, button: str) -> str:
        """Press a button."""
        await self.interpreter.run("import time; time.sleep(0.3)")
        return await super().press(button)

    tools = (press,)

    async def close(self):
        await self.interpreter.close()
        await super().close()

    def save_state(self):
        return {"result": self.result}
