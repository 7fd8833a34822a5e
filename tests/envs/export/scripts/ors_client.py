"""openreward's own client plays exported servers, with the actions of experts and with wrong ones."""

import asyncio
import importlib.util
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import uvicorn
import worlds
from openreward import EnvironmentsAPI
from openreward.api.errors import OpenRewardError

from agentrl import ScriptedAgent, Task, ToolEnv, make, play, register, say
from agentrl.envs import score
from agentrl.envs.export.on_ors import EpisodeEnvironment, Server


class Failing(EpisodeEnvironment):
    """A world that fails."""

    env_id = f"{worlds.Broken.__name__}-v0"


async def touch() -> str:
    """Touch."""
    return "cold"


class Picture(EpisodeEnvironment):
    """A world that begins with a call and an image."""

    env_id = f"{worlds.Pictured.__name__}-v0"


class Slow(ToolEnv):
    """Two tools that take a while, and one that comes with the task."""

    def tasks(self, split):
        return [Task.ask("one", "Look, and listen.")]

    async def look(self) -> str:
        """Look."""
        await asyncio.sleep(0.3)
        return "dark"

    async def listen(self) -> str:
        """Listen."""
        await asyncio.sleep(0.3)
        return "quiet"

    tools = (look, listen)

    async def reset(self, task, *, seed):
        self.offer(touch)
        return await super().reset(task, seed=seed)

    def reward(self, task, answer):
        return float(answer == "dark and quiet")


register("Slow-v0", Slow)


class SlowWorld(EpisodeEnvironment):
    """Its calls overlap."""

    env_id = "Slow-v0"


class Served:
    """A server at a free port of this machine."""

    def __init__(self, app):
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.05)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self):
        self._server.should_exit = True
        self._thread.join()


def exported(folder):
    """What the `server.py` of a folder serves."""
    spec = importlib.util.spec_from_file_location(
        f"served_{folder.name.replace('-', '_')}", folder / "server.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.app


def played(session, script):
    """What the last call said: the reward, the parts, and the outputs before."""
    is_final = session.is_assistant_message_final()
    text, seen, action = None, [], None
    for _ in range(50):
        action = next(script) if text is None or not hasattr(script, "send") else script.send(text)
        for call in action.tool_calls:
            output = session.call_tool(call.name, dict(call.arguments))
        if not action.tool_calls and is_final:
            output = session.call_terminal_tool(action.text)
        elif not action.tool_calls:
            output = session.call_tool("say", {"message": action.text})
        text = "\n".join(block.text for block in output.blocks)
        seen.append(text)
        if output.finished:
            return output.reward, output.metadata["parts"], seen
    raise AssertionError("it has not ended")


async def own(env_id, task, script, seed):
    env = make(env_id)
    episode = await play(env, ScriptedAgent(script), task, seed=seed)
    verdict = (await score([episode], env.rewards)).verdicts[0]
    seen = ["\n".join(message.text for message in turn.observation) for turn in episode.turns[1:]]
    return [verdict.total, dict(verdict.parts), seen]


def pairs(env, env_id, number):
    """What both make of a task: played by the expert, and wrongly."""
    world = make(env_id)
    task = world.tasks("test")[number]
    for script in (world.expert, lambda task: iter([say("zzzzz")] * 20)):
        with env.session(split="test", index=number) as session:
            prompt = [[message.role, message.blocks[0].text] for message in session.get_messages()]
            reward, parts, seen = played(session, script(task))
        ours = asyncio.run(own(env_id, task, script(task), number))
        yield {
            "theirs": [reward, parts, seen[:-1]],
            "ours": ours,
            "prompt": prompt == [[message.role, message.text] for message in task.prompt],
        }


def told_of(folder):
    """All that a client is told of an exported environment, and what becomes of its episodes."""
    env_id, served = folder.name, Served(exported(folder))
    world = make(env_id)
    with EnvironmentsAPI(served.url, api_key="none") as api:
        env = api.get("any")
        tasks = env.list_tasks("test")
        found = {
            "splits": env.list_splits() == list(world.splits),
            "tasks": [task.task_spec["task"] for task in tasks] == [task.id for task in world.tasks("test")],
            "tools": [[tool.name, tool.input_schema] for tool in env.list_tools()],
            "final": env.is_assistant_message_final(),
            "pairs": [pair for number in range(2) for pair in pairs(env, env_id, number)],
        }
        with env.session(task=tasks[0]) as session:
            found["unknown"] = error_of(lambda: session.call_tool("nowhere", {"x": 1}))
        tasks[0].task_spec["task"] = "nowhere"
        found["refused"] = error_of(lambda: env.session(task=tasks[0]).__enter__())
    served.stop()
    return found


def error_of(call):
    try:
        call()
    except (OpenRewardError, aiohttp.ClientResponseError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(api):
    with api.get("any").session(split="train", index=0) as session:
        session.call_tool("say", {"message": "once"})
        return error_of(lambda: session.call_tool("say", {"message": "twice"}))


def at_once(api):
    """The results of calls that a client makes at the same time, and the reward."""
    env = api.get("any", variant="slowworld")
    with env.session(split="train", index=0) as session, ThreadPoolExecutor() as threads:
        outputs = list(threads.map(session.call_tool, ["look", "listen"]))
        outputs.append(session.call_tool("touch"))
        texts = [output.blocks[0].text for output in outputs]
        texts += [tool.name for tool in session.list_tools()]
        return [texts, session.call_terminal_tool("dark and quiet").reward]


def shown(api):
    """A prompt as openreward turns it into one for OpenAI, and the reward."""
    env = api.get("any", variant="picture")
    with env.session(split="train", index=0) as session:
        messages = session.get_messages(format="openai")
        return [messages, session.call_tool("say", {"message": "a picture"}).reward]


odd = Served(Server([Failing, SlowWorld, Picture]).app)
with EnvironmentsAPI(odd.url, api_key="none") as api:
    found = {"failing": failing(api), "at once": at_once(api), "shown": shown(api)}
odd.stop()
folders = [Path(each) for each in sys.argv[1:]]
print(json.dumps({**{each.name: told_of(each) for each in folders}, **found}))
