"""Programs as agents: in the sandbox, with one address, and scored for what the model can make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl import ScriptedAgent, play
from agentrl.algorithms.samples import samples_of
from agentrl.envs.gateway import HarnessEnv
from agentrl.tools.shell import ShellTool
from agentrl.types import Ending
from tests.envs.gateway.worlds import ASK, adds, episode_of, says

SHELL = ShellTool(timeout_s=20, memory_mb=512, packages=("openai",), max_concurrency=4)
QUICK = ShellTool(timeout_s=3, memory_mb=256, max_concurrency=4)
ASKS = """
import json, os, sys, urllib.request


def ask(text, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    head = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


"""
CLIENT = """
import json
from openai import OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties":
        {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
client, messages = OpenAI(), [{"role": "user", "content": open("task.txt").read()}]
while True:
    message = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
open("answer.txt", "w").write(message.content)
print(message.content)
"""


class Program(HarnessEnv):
    """A program that a test writes; both the answer and the folder count."""

    id = "Program-v0"
    program = "python agent.py"
    shell = SHELL
    limits = replace(HarnessEnv.limits, max_turns=8, max_tokens=2000)

    def __init__(self, code, **settings):
        super().__init__()
        self.code = code
        for name, value in settings.items():
            setattr(self, name, value)

    def tasks(self, split):
        return [ASK]

    def files(self, task):
        return {"agent.py": self.code, "task.txt": task.prompt[0].text}

    def grade(self, task, answer, files):
        self.seen = (answer, files)
        right = answer.strip() == task.answer
        return {"answer": float(right), "file": float(files.get("answer.txt") == task.answer)}


async def test_a_program_in_the_sandbox_is_played_and_graded_by_its_answer_and_its_folder():
    env = Program(CLIENT)
    episode, policy = await episode_of(None, says("", adds(2, 3)), says("5"), env=env)
    assert (episode.failure, episode.ending, episode.total_of()) == (None, Ending.COMPLETED, 2.0)
    assert set(env.seen[1]) == {"agent.py", "task.txt", "answer.txt"}
    (sample,) = samples_of(episode)
    (first, said), (second, _) = policy.asked
    assert second[: len(first) + len(said)] == (*first, *said)
    assert sample.loss_mask.sum() == sum(len(ids) for _, ids in policy.asked)
    assert episode.counts == {"requests": 2}


async def test_a_program_takes_the_turns_of_an_agent_without_tokens():
    def script(task):
        yield says((yield says("", adds(2, 3))))

    episode = await play(Program(CLIENT), ScriptedAgent(script(ASK)), ASK)
    assert (episode.failure, episode.total_of()) == (None, 2.0)


ENDINGS = {
    "never calls": ("print(5)", ("program", "invalid"), Ending.FAILED, None),
    "breaks before": ("raise KeyError('x')", ("program", "invalid"), Ending.FAILED, "agent_failures"),
    "exits badly": (f"{ASKS}ask('x'); print(5); sys.exit(3)", None, Ending.COMPLETED, "agent_failures"),
    "hangs": (f"{ASKS}ask('x')\nwhile True: pass", None, Ending.TRUNCATED, "agent_timeouts"),
    "floods": (f"{ASKS}ask('x')\nwhile True: print('x' * 9999)", None, Ending.COMPLETED, "agent_failures"),
    "takes memory": (f"{ASKS}ask('x')\nx = bytearray(2**30)", None, Ending.COMPLETED, "agent_failures"),
    "forks": (f"{ASKS}ask('x')\nwhile True: os.fork()", None, Ending.COMPLETED, "agent_failures"),
    "kills": (f"{ASKS}ask('x'); os.kill(os.getppid(), 9)", None, Ending.COMPLETED, "agent_failures"),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_program_that_ends_badly_is_typed_or_scored(name):
    code, failure, ending, count = ENDINGS[name]
    episode, _ = await episode_of(None, says("5"), env=Program(code, shell=QUICK))
    found = episode.failure and (episode.failure.stage, episode.failure.kind)
    assert (found, episode.ending) == (failure, ending), episode.failure
    assert {each for each in episode.counts if each.startswith("agent_")} == ({count} if count else set())


SPY = f"""{ASKS}
import socket
ask("first")
own = os.environ["OPENAI_BASE_URL"]
tries = {{}}
def tried(name, act):
    try:
        act()
        tries[name] = "done"
    except OSError as error:
        tries[name] = type(error).__name__
host, port = "127.0.0.1", int(own.split(":")[2].split("/")[0])
tried("key", lambda: ask("x", key="guessed"))
tried("episode", lambda: ask("x", url=own.replace("/e-1", "/e-2")))
tried("outside", lambda: socket.create_connection(("10.1.2.3", 80), 2))
tried("gateway", lambda: socket.create_connection((host, GATEWAY), 2))
for family in ("AF_UNIX", "AF_INET6", "AF_NETLINK", "AF_PACKET"):
    tried(family, lambda: socket.socket(getattr(socket, family)))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW))
tried("datagrams", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
def listens():
    with socket.socket() as own: own.bind((host, 0)); own.listen()
tried("listen", listens)
def buffers():
    with socket.socket() as own: own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
tried("buffers", buffers)
tries["names"] = sorted(name for name in os.environ if "AGENT" in name or "KEY" in name or "URL" in name)
print(json.dumps(tries))
"""


async def test_a_program_reaches_its_own_episode_and_nothing_else():
    import json

    from agentrl.envs.gateway.server import GATEWAY

    port = (await GATEWAY.get()).address.rpartition(":")[2]
    env = Program(SPY.replace("GATEWAY)", f"{port})"))
    episode, _ = await episode_of(None, says("5"), env=env)
    assert episode.failure is None, episode.failure
    tries = json.loads(env.seen[0])
    names = ["ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"]
    assert tries.pop("names") == names
    assert {tries.pop("key"), tries.pop("episode")} == {"HTTPError"}
    assert tries.pop("gateway") == "ConnectionRefusedError"
    assert tries.pop("outside") == "OSError"
    assert set(tries.values()) == {"PermissionError"}
