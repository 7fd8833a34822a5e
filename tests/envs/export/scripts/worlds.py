"""Worlds that are odd: one fails, and one begins with a call and an image."""

from agentrl import Env, Image, Message, Task, Text, register
from agentrl.types import ToolCall

PICTURE = Image.of(b"a small picture")
SHOWN = (
    Message("system", "Be brief."),
    Message("assistant", "I look.", tool_calls=(ToolCall("look", {"where": "up"}, id="c1"),)),
    Message("tool", "a roof", tool_call_id="c1"),
    Message("user", (Text("What is this?"), PICTURE)),
)


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


class Pictured(Env):
    """Shows a picture, and asks what it is."""

    def tasks(self, split):
        return [Task(f"{split}-1", SHOWN, split=split)]

    async def reset(self, task, *, seed):
        return task.prompt, {}

    async def step(self, action):
        return (), float(action.text == "a picture"), True, False, {}


register("Broken-v0", Broken)
register("Pictured-v0", Pictured)
