"""Tasksets of verifiers, in an environment of their own: it cannot be installed with the extra mcp."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from agentrl.envs.verifiers import VerifiersEnv, VerifiersTaskset
from agentrl.errors import MissingExtraError
from tests.house.source import ROOT

TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Reverse(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def brief(self, task, trace) -> float:
        return float(len(trace.last_reply) <= len(task.prompt))


class Reversals(vf.Taskset[Reverse]):
    def load(self):
        system = "Spell it backwards."
        for word in ("abc", "level", "stressed", "drawer"):
            yield Reverse(Data(prompt=word, answer=word[::-1], system_prompt=system), self.config.task)


__all__ = ["Reversals"]
"""
BOXED = TASKSET.replace(
    "class Reverse(vf.Task[Data]):", "class Reverse(vf.Task[Data]):\n    NEEDS_CONTAINER = True\n"
)
PLAY = """
import asyncio
from agentrl import ScriptedAgent, UserError, play, say
from agentrl.envs.scoring import sum_of_steps
from agentrl.envs.verifiers import VerifiersEnv, VerifiersTaskset

env = VerifiersTaskset("reversals", num_test=1)
assert [len(env.tasks(split)) for split in ("train", "test")] == [3, 1]
task = env.tasks("train")[1]
assert [(message.role, message.text) for message in task.prompt] == [
    ("system", "Spell it backwards."), ("user", "stressed")
]
episode = asyncio.run(play(env, ScriptedAgent(env.expert(task)), task))
assert sum_of_steps(episode).parts == {"env": 1.0, "env/right": 0.75, "env/brief": 0.25}, episode
episode = asyncio.run(play(env, ScriptedAgent(say("no") for _ in "1"), task))
assert episode.total_of() == 0.25
for wrong, reason in (
    (VerifiersTaskset("boxed"), "need a container"),
    (VerifiersTaskset("nowhere"), "cannot load"),
    (VerifiersEnv("reversals"), "verifiers 0.4.0 has no environments"),
):
    try:
        wrong.tasks("test")
    except UserError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(reason)
print("all well")
"""


def test_without_the_package_it_is_one_sentence():
    with pytest.raises(
        MissingExtraError, match=r"the taskset words needs verifiers: pip install 'agentrl\[ver"
    ):
        VerifiersTaskset("words").tasks("test")
    with pytest.raises(MissingExtraError, match="the environment words needs verifiers"):
        VerifiersEnv("words").tasks("test")


@pytest.mark.full
def test_a_taskset_is_asked_and_scored_by_its_own_rewards(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    own = shlex.split(os.environ.get("PIP_ARGS", ""))
    install = [python, "-m", "pip", "install", "--quiet", f"{ROOT}[verifiers]", *own]
    subprocess.run(install, check=True, timeout=1200)
    for name, text in {"reversals": TASKSET, "boxed": BOXED, "play": PLAY}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [python, "play.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["all well"], done.stdout + done.stderr
