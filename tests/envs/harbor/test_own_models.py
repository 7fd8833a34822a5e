"""The models of the `harbor` package read our tasks and our trajectories, and we know each of its options."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from agentrl.cli import main
from agentrl.envs.harbor.env import survey
from agentrl.types import Restart
from tests.envs.gateway.worlds import episode_of, post, says
from tests.envs.harbor.folders import HELLO, REPORT, write
from tests.house.source import ROOT
from tests.view.episodes.journals import entry
from tests.view.episodes.journals import write as write_journal
from tests.view.formats.played import entries

pytestmark = pytest.mark.full

PYTHON = ROOT / ".venv-harbor" / "bin" / "python"
SCRIPT = ROOT / "tests" / "envs" / "harbor" / "scripts" / "own_models.py"


def read(what, path="none"):
    """What the package reads."""
    assert PYTHON.exists(), "make .venv-harbor/.installed makes the environment of Harbor's models"
    done = subprocess.run([PYTHON, SCRIPT, what, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def exported(folder, found):
    """The documents of some entries."""
    write_journal(folder / "run", {1: found})
    main(["export", str(folder / "run"), "--format", "atif", "--out", str(folder / "x.jsonl")])
    return read("atif", folder / "x.jsonl")


def test_trajectories_of_episodes(tmp_path):
    found = exported(tmp_path, entries())
    assert {each["schema"] for each in found} == {"ATIF-v1.8"}
    assert [each["id"] for each in found] == ["g0-0", "g0-1", "g0-2-retry1", "g1-0", "g2-0", "g3-0"]
    assert found[0]["ids"] == [[3, 4], [7]]
    assert [inner["id"] for inner in found[3]["subagents"]] == ["g1-0#1"]


def user(text):
    return {"role": "user", "content": text}


async def compacting(url, key, task):
    """Asks twice, has a sub-agent ask, and goes on from a summary."""

    async def said(*messages):
        reply = await post(url, "/chat/completions", key, {"model": "m", "messages": messages})
        return reply.json()["choices"][0]["message"]

    first = await said(user("How many?"))
    await said(user("How many?"), first, user("And then?"))
    await said(user("You are another. How many?"))
    await said(user("How many?"), user("In short: 5."))
    return "5"


async def test_trajectories_of_an_agent_behind_the_gateway_are_a_tree(tmp_path):
    episode, policy = await episode_of(compacting, says("5"), says("4"), says("3"))
    reasons = [trajectory.reason for trajectory in episode.trajectories]
    assert reasons == [None, Restart.SUB_AGENT, Restart.COMPACTED]
    (found,) = exported(tmp_path, [entry(replace(episode, id="g0-0"))])
    documents = [found, *found["subagents"]]
    assert len(documents) == 3
    sampled = sorted(ids for document in documents for ids in document["ids"])
    assert sampled == sorted(list(ids) for _, ids in policy.asked)


def test_folders_of_tasks(tmp_path):
    write(tmp_path / "hello", HELLO)
    write(tmp_path / "report", REPORT)
    assert [task.refused for task in survey(str(tmp_path))] == [(), ()]
    found = read("tasks", tmp_path)
    assert found["hello"]["instruction"] == HELLO["instruction.md"]
    assert (found["hello"]["timeout_s"], found["report"]["memory_mb"]) == (30.0, 256)
    assert found["report"]["env"] == {"REGION": "north"}


HELD = {
    *("metadata", "verifier.timeout_sec", "verifier.env", "solution.env"),
    *("environment.env", "environment.memory_mb"),
}
"""Options that act here as there."""
REFUSED = {
    *("steps", "agent.user", "verifier.user", "verifier.environment_mode", "verifier.environment"),
    *("verifier.collect", "environment.docker_image", "environment.gpus", "environment.mcp_servers"),
    *("environment.healthcheck", "environment.os", "environment.tpu", "environment.workdir"),
}
"""Options that are refused by name, where they are set to what is not held."""
WITHOUT_EFFECT = {
    *("schema_version", "source", "task"),  # of the registry
    *("agent.timeout_sec", "environment.cpus", "environment.storage_mb"),  # the run's own limits hold
    *(
        f"{part}.{name}"
        for part in ("agent", "verifier", "environment")
        for name in ("network_mode", "allowed_hosts")
    ),
    "environment.allow_internet",  # there is no network
    "environment.build_timeout_sec",  # nothing is built
    "environment.gpu_types",  # of gpus
    "environment.skills_dir",  # of Harbor's own agents
    "multi_step_reward_strategy",  # of steps
    "artifacts",  # what Harbor copies out for people
}


def test_each_option_is_held_refused_or_without_effect():
    options = set(read("options"))
    assert options == HELD | REFUSED | WITHOUT_EFFECT
    assert len(options) == len(HELD) + len(REFUSED) + len(WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ('[environment]\nos = "windows"\n', "environment.os"),
        ('[environment.tpu]\ntype = "v4"\ntopology = "2x2x1"\n', "environment.tpu"),
        ('[environment]\nworkdir = "/srv"\n', "environment.workdir"),
        ("[verifier.environment]\nmemory_mb = 99\n", "verifier.environment"),
        ('[[verifier.collect]]\ncommand = "true"\n', "verifier.collect"),
    ],
)
def test_options_that_are_not_held_are_refused_by_name(tmp_path, settings, name):
    write(tmp_path / "one", {**HELLO, "task.toml": settings})
    (task,) = survey(str(tmp_path))
    assert any(name in why for why in task.refused), task.refused
