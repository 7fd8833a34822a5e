"""`examples/authors`: what counts as a sound environment there, and what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

pytestmark = pytest.mark.full
EXAMPLE = ROOT / "examples" / "authors"
GUESS = '''
import random

from agentrl import Limits, Task, ToolEnv, call, say, tool


class World(ToolEnv):
    """Find a number from 1 to 64 with seven guesses."""

    limits = Limits(max_turns=9, max_tokens=400)
    chance_score = 0.25

    @tool(inline=True)
    def guess(self, number: int) -> str:
        """Guess the number."""
        self.guesses += 1
        self.found = self.found or (number == self.hidden and self.guesses <= 7)
        return "right" if number == self.hidden else "higher" if number < self.hidden else "lower"

    tools = (guess,)

    def tasks(self, split):
        rng = random.Random(split)
        hidden = [rng.randint(1, 64) for _ in range(64)]
        prompts = [f"{split} game {n}: find it." for n in range(64)]
        return [Task.ask(prompt, prompt, "", hidden=h) for prompt, h in zip(prompts, hidden)]

    async def reset(self, task, *, seed):
        self.hidden, self.guesses, self.found = task.metadata["hidden"], 0, False
        return await super().reset(task, seed=seed)

    def reward(self, task, answer):
        return REWARD

    def expert(self, task):
        low, high, said = 1, 64, ""
        while said != "right":
            middle = (low + high) // 2
            said = yield call("guess", number=middle)
            low, high = (middle + 1, high) if said == "higher" else (low, middle - 1)
        yield say("found")
'''
HONEST = GUESS.replace("REWARD", "float(self.found)")


@pytest.mark.parametrize(
    ("world", "fault"),
    [
        (HONEST, None),
        (GUESS.replace("REWARD", "1.0"), "envs check"),
        (HONEST.replace("guess", "ask"), "guess were asked for"),
        (HONEST.replace('said = yield call("guess", number=middle)', 'said = "right"'), "envs check"),
        (None, "there is no world.py"),
    ],
    ids=["sound", "pays for nothing", "another tool", "an expert without calls", "nothing written"],
)
def test_an_environment_counts_where_it_is_sound_and_what_was_asked_for(
    world: str | None, fault: str | None, tmp_path: Path
) -> None:
    (tmp_path / "written.py").write_text(world or "", encoding="utf-8")
    read = "grep -q 'hidden whole number' PROMPT.md && grep -q '^# Write an environment' SKILL.md"
    agent = f"{read} && cp {tmp_path}/written.py world.py"
    command = [sys.executable, EXAMPLE / "measure.py", "--out", tmp_path / "out", "--only", "guess"]
    done = subprocess.run(
        [*command, "--agent", agent if world else "true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["of"] == 1
    assert told["sound"] == (fault is None), told
    assert (fault or "") in (told["faults"]["guess"] or ""), told


def test_each_of_the_ten_tasks_names_its_tools_in_its_prompt() -> None:
    tasks = json.loads((EXAMPLE / "tasks.json").read_text(encoding="utf-8"))
    assert len({task["name"] for task in tasks}) == 10
    for task in tasks:
        assert all(f"{tool}(" in task["prompt"] for tool in task["tools"]), task["name"]
