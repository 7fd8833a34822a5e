"""Boxes opened by clients of others, each a process as it is, and a small model that opens them, too.

A client is a process that plays one task after another, in all of its ways, so that it is started once. It
is a Python of `.venv-clients`, which is not ours; all clients are installed in that one. It inherits nothing
but the variables below. It reaches 127.0.0.1 alone (`scripts/offline`): Python's sockets are held to that.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import agentrl
from agentrl import Limits, Message, Task, call, say
from agentrl.envs.gateway import HarnessEnv
from agentrl.tools import Shared
from agentrl.types.seams import ToolSchema
from tests.envs.gateway.scripts.playing import CONTENTS, DESCRIPTION, NAME, SCHEMA
from tests.house.source import ROOT

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PACKAGES = ROOT / ".venv-clients" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
MINI = "mini"
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WAYS = {
    "openai": (
        *(
            "whole",
            "streamed",
            "async",
            "async streamed",
            "compacted",
            "results dropped",
            "beside each other",
        ),
        *("responses", "responses streamed", "responses async streamed", "responses remembered"),
    ),
    "anthropic": ("whole", "streamed", "async", "async streamed"),
    "openai_agents": (
        *("chat", "chat streamed", "responses", "responses streamed"),
        *("handoff", "sub-agent"),
    ),
    "langgraph": ("chat", "chat streamed", "responses", "trimmed"),
    "pydantic_ai": ("chat", "responses", "anthropic"),
    "smolagents": ("chat",),
    MINI: ("command",),
}
"""By client, the ways in which it plays: those of its script."""
DEMONSTRATED = (
    *(("openai", "whole"), ("openai", "compacted"), ("anthropic", "whole"), ("openai_agents", "chat")),
    *(("openai_agents", "handoff"), ("openai_agents", "sub-agent"), ("langgraph", "chat")),
    *(("pydantic_ai", "chat"), ("smolagents", "chat"), (MINI, "command")),
)
"""Those whose conversations the model is trained on; the prompts of the others are like these."""
LONG = (MINI, "smolagents")
"""Clients with prompts of thousands of tokens; fewer of their tasks are demonstrated."""
PAIRS = (("amber", "birch"), ("cedar", "delta"), ("ember", "flint"), ("birch", "cedar"))
OPEN = ToolSchema(NAME, DESCRIPTION, SCHEMA)
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(SCRIPTS / "offline"),
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    # Nobody listens there: what does not use Python's sockets finds no way out by a proxy, either.
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
}


class ClientError(Exception):
    """What a client has raised."""


class Client:
    """The process of a client, which plays one task after another."""

    def __init__(self, name: str) -> None:
        self._script = SCRIPTS / f"{name}_agent.py"
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def played(self, task, folder):
        """The answer to a task.

        folder: the client's home, where it works and writes its errors (NAME.log).

        Raises:
            ClientError: the client has raised something.
        """
        async with self._turn:
            process = self._process = self._process or await self._started(folder)
            line = None
            try:
                process.stdin.write(json.dumps(task).encode() + b"\n")
                line = await process.stdout.readline()
            finally:
                if line is None:
                    # Its next line would be the answer to this task.
                    await self.close()
        reply = json.loads(line or '{"error": "its process has ended"}')
        if reply["error"] is not None:
            raise ClientError(reply["error"])
        return reply["answer"]

    async def close(self):
        """End it, and what it has started."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _started(self, folder):
        with (folder / f"{self._script.stem}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                PYTHON, self._script, cwd=folder, env={**VARIABLES, "HOME": str(folder)},
                stdin=-1, stdout=-1, stderr=log, start_new_session=True,
            )  # fmt: skip


@asynccontextmanager
async def _clients():
    assert PYTHON.exists(), f"make {PYTHON.parents[1].name}/.installed installs these clients"
    clients = {name: Client(name) for name in WAYS}
    try:
        yield clients
    finally:
        for client in clients.values():
            await client.close()


CLIENTS = Shared(_clients, "clients")


class Boxes(HarnessEnv):
    """Open boxes until they hold values, and say these.

    folder: that of the clients. client: who plays; "" = all of them.
    """

    id = "ClientsOpenBoxes"
    # Of an episode and those of its client before it.
    timeout_s = 3000.0
    limits = Limits(
        max_turns=24, max_tokens=3800, episode_timeout_s=3600.0, reset_timeout_s=None, step_timeout_s=None
    )
    splits = ("train", "test", "demonstrated")
    tools = (OPEN,)

    def __init__(self, folder: str, client: str = "") -> None:
        super().__init__()
        self._folder, self._client = Path(folder), client

    def tasks(self, split):
        """Of `train` some for each way, which are played; of `demonstrated` all, in some ways."""
        if split == "demonstrated":
            return [task for way in DEMONSTRATED for task in tasks_of(*way, demonstrates=True)]
        clients = [self._client] if self._client else WAYS
        return [task for client in clients for way in WAYS[client] for task in tasks_of(client, way)]

    async def agent(self, base_url, key, task):
        of_anthropic = base_url.removesuffix("/v1")
        variables = {
            **{"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key},
            **{"ANTHROPIC_BASE_URL": of_anthropic, "ANTHROPIC_API_KEY": key},
        }
        client = (await CLIENTS.get())[task.metadata["client"]]
        asked = {"way": task.metadata["way"], "question": task.prompt[0].text, "variables": variables}
        return await client.played(asked, self._folder)

    def grade(self, task, answer, files):
        return float(answer.split() == task.answer.split())

    def expert(self, task):
        """The turns that solve it, with the tools of its client."""
        client, boxes, way = (task.metadata[name] for name in ("client", "boxes", "way"))
        if way == "handoff":
            yield call("transfer_to_opener")
        if way == "sub-agent":
            yield call("ask_opener", input=task.prompt[0].text)
        yield from (_calls(client, found) for found in _found(boxes))
        if way == "sub-agent":
            yield say(task.answer)
        if client == "smolagents":
            yield call("final_answer", answer=task.answer)
        elif client == MINI:
            yield call("bash", command=f"echo {SUBMIT}; echo {task.answer}")
        else:
            yield say(task.answer)

    def corpus(self):
        """What the clients say, so that their prompts are few tokens."""
        yield from (f"{a} {b}" for a, b in CONTENTS.items())
        yield from (path.read_text() for path in sorted(SCRIPTS.glob("*.py")))
        packages = next((PYTHON.parents[1] / "lib").glob("python*")) / "site-packages"
        for name in ("smolagents/prompts/toolcalling_agent.yaml", "minisweagent/config/mini.yaml"):
            yield (packages / name).read_text()


def _found(boxes):
    """The boxes that are opened at once, one turn after another."""
    while boxes := [box for box in boxes if box in CONTENTS]:
        yield boxes
        boxes = [CONTENTS[box] for box in boxes]


def _calls(client, boxes):
    """A turn that opens boxes."""
    if client == MINI:
        calls = [call("bash", command=f"cat {box}") for box in boxes]
    else:
        calls = [call(NAME, box=box) for box in boxes]
    return Message("assistant", "", tool_calls=tuple(each.tool_calls[0] for each in calls))


def tasks_of(client, way, *, demonstrates=False):
    """Tasks of one way: with calls one after another, and with two in one turn.

    demonstrates: all of them, or every second one; else four, those with the most turns among them.
    """
    alone = [(box,) for box in CONTENTS]
    asked = [*alone, *PAIRS] if demonstrates else [*alone[-3:], PAIRS[0]]
    if demonstrates and client in LONG:
        asked = asked[::2]
    for boxes in asked:
        *_, last = _found(boxes)
        answer = " ".join(CONTENTS[box] for box in last)
        question = f"Open {' and '.join(boxes)}."
        yield Task.ask(
            f"{client}/{way}/{'-'.join(boxes)}", question, answer, client=client, way=way, boxes=list(boxes)
        )


MODEL = {
    **{"num_layers": 2, "hidden_size": 96, "ffn_hidden_size": 256, "num_attention_heads": 4},
    **{"num_query_groups": 2, "kv_channels": 32, "vocab_size": 1600},
    **{"warm_start_steps": 100, "warm_start_batch_size": 16, "warm_start_lr": 1e-2},
    **{"warm_start_split": "demonstrated", "num_rollout": 0, "skip_eval_before_train": True, "seed": 1},
}


def trained_model(cache: Path) -> Path:
    """A model that plays these tasks with all clients, in a folder of `cache`.

    It is made once for the same clients and tasks, by the first process that asks, in a minute or two.
    """
    sources = sorted([*SCRIPTS.rglob("*.py"), Path(__file__), ROOT / "clients.txt"])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = cache / f"clients-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            _train(cache, folder)
            (folder / "made").touch()
    return folder / "checkpoint"


def _train(cache, folder):
    with tempfile.TemporaryDirectory(dir=cache) as home:
        made = agentrl.train(
            env="tests.envs.gateway.boxes:Boxes",
            env_kwargs={"folder": home},
            num_demonstrations=len(Boxes(home).tasks("demonstrated")),
            output_dir=str(cache),
            name=folder.name,
            inline=True,
            quiet=True,
            **MODEL,
        )
    assert made.folder == folder
