"""The core alone is the gym: without torch and its kin one writes, checks, plays and scores agents."""

from __future__ import annotations

import asyncio
import json

import pytest

import agentrl
from tests.cli.light import core, missing, run_light
from tests.engine.chat.chat_server import ChatServer, expert_of

HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "matplotlib", "tensorboard", "mcp", "faiss"}
RUN = ["--env", "Calculator-v0", "--num-rollout", "1"]
ENDPOINT = ["--openai-url", "http://127.0.0.1:1/v1", "--openai-model", "m"]
DENSE = ["serve-search", "c.jsonl", "--index", "dense", "--encoder"]
WORLD = """
from agentrl import SingleTurnEnv

class World(SingleTurnEnv):
    def tasks(self, split):
        import torch

    def grade(self, task, answer):
        return 0.0
"""
PLAY = """
import asyncio
import gymnasium
import agentrl
from agentrl import *
from agentrl.envs import tasks_of
from agentrl.records import read_journal, read_metrics
import agentrl.view.report, agentrl.view.console, agentrl.algorithms.estimators, agentrl.rollout.producer

for env_id in ("HopSearch-v0", "Calculator-v0", "Taxi-v0"):
    env = make(env_id)
    task = tasks_of(env, "test")[0]
    episode = asyncio.run(play(env, ScriptedAgent(env.expert(task)), task))
    print(episode.failure is None and sum(reward or 0 for reward in episode.step_rewards) > 0)
world = gymnasium.make("agentrl:agentrl/HopSearch-v0")
world.reset(seed=0)
world.step("<search> Fapi Pevi born</search>")
try:
    agentrl.train(env="Calculator-v0")
except UserError as error:
    print(error)
"""


def test_the_heavy_packages_are_missing_and_the_core_is_there():
    assert set(missing()) >= HEAVY
    assert {"numpy", "bm25s", "starlette", "gymnasium"} <= core()


def test_worlds_are_played_in_python(tmp_path):
    done = run_light(tmp_path, code=PLAY)
    assert done.returncode == 0, done
    *played, sentence = done.stdout.splitlines()
    assert played == ["True"] * 3
    assert sentence == "training needs torch: pip install 'agentrl[train]'."


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["envs", "show", "HopSearch-v0", "--json"],
        ["envs", "check", "Calculator-v0", "--n", "4"],
        ["envs", "new", "stock-room"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_works(tmp_path, arguments):
    done = run_light(tmp_path, *arguments)
    # On a busy machine a check says what it does.
    errors = [line for line in done.stderr.splitlines() if not line.startswith("checking: ")]
    assert (done.returncode, errors) == (0, []), done


def test_every_environment_and_tool_is_listed(tmp_path):
    listed = json.loads(run_light(tmp_path, "envs", "list", "--json").stdout)
    assert {row["id"] for row in listed} == set(agentrl.env_ids())
    assert [row["id"] for row in listed if row["tools"] is None] == []
    tools = json.loads(run_light(tmp_path, "tools", "list", "--json").stdout)
    assert [row["name"] for row in tools if row["kind"] is None] == []


async def test_an_endpoint_is_scored(tmp_path):
    env = agentrl.make("HopSearch-v0")
    async with ChatServer(expert_of(env, "test"), key=None).serving() as server:
        where = ["--openai-url", server.url, "--openai-model", "m", "--n", "4", "--output-dir", "scored"]
        done = await asyncio.to_thread(run_light, tmp_path, "eval", "HopSearch-v0", "--json", *where)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["mean"] == 1.0
    assert list((tmp_path / "scored").rglob("*.jsonl.gz"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *RUN], "training needs torch: pip install 'agentrl[train]'."),
        (
            ["eval", "Calculator-v0", "--model", "m"],
            "opening a model needs torch: pip install 'agentrl[train]'.",
        ),
        (["gateway", "--model", "m"], "opening a model needs torch: pip install 'agentrl[train]'."),
        (["serve", "m"], "serving a model needs torch: pip install 'agentrl[train]'."),
        (["plot", "run"], "a picture of curves needs matplotlib: pip install 'agentrl[train]'."),
        (
            [*DENSE, "sentences"],
            "a sentence encoder needs sentence-transformers: pip install 'agentrl[search]'.",
        ),
        ([*DENSE, "encoders:ones"], "dense search needs faiss-cpu: pip install 'agentrl[search]'."),
        (
            ["tools", "show", "mcp", "--tool-kwargs", '{"command": "x"}'],
            "a session with an MCP server needs mcp: pip install 'agentrl[mcp]'.",
        ),
        (
            ["serve-env", "Calculator-v0"],
            "serving an environment needs websockets: pip install 'agentrl[openenv]'.",
        ),
        (["eval", "custom:World", *ENDPOINT], "this needs torch: pip install 'agentrl[train]'."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_missing_is_named_in_a_sentence(tmp_path, arguments, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "time_s": 0, "eval/greedy": 1.0}\n')
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "Title\\nText."}\n')
    (tmp_path / "sentences").mkdir()
    (tmp_path / "sentences" / "modules.json").write_text("[]")
    (tmp_path / "encoders.py").write_text(
        "import numpy\nones = lambda texts: numpy.ones((len(texts), 2), 'f')\n"
    )
    (tmp_path / "custom.py").write_text(WORLD)
    done = run_light(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"agentrl: {message}\n")
