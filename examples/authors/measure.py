"""Can a coding agent write environments with the skill alone? Ten tasks, each in a folder of its own.

    python examples/authors/measure.py --agent 'my-agent --yes "$(cat PROMPT.md)"' --out runs/authors

The agent's command runs in a folder with PROMPT.md and SKILL.md, and writes world.py. An environment
counts where `agentrl envs check` and `agentrl envs attack` find nothing, its tools are those that were asked
for, and its expert needs them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import click

from agentrl import Env, ScriptedAgent, Task, play
from agentrl.envs import find

HERE = Path(__file__).parent
SKILL = HERE.parents[1] / "skills" / "write-an-environment" / "SKILL.md"
PROMPT = """Read SKILL.md. Write the environment below as the class World in world.py, in this folder, and
prove it as the skill says (`agentrl envs check world:World`, `agentrl envs attack world:World --budget 200`).
Its tools have exactly the names that are given.
{prompt}"""


def _written(agent: str, folder: Path, prompt: str, seconds: float) -> str | None:
    """Have the agent write its environment; what went wrong, or None."""
    folder.mkdir(parents=True)
    shutil.copy(SKILL, folder / "SKILL.md")
    (folder / "PROMPT.md").write_text(PROMPT.format(prompt=prompt), encoding="utf-8")
    try:
        with (folder / "agent.log").open("w") as log:
            subprocess.run(
                ["bash", "-c", agent], cwd=folder, stdout=log, stderr=log, timeout=seconds, check=False
            )
    except subprocess.TimeoutExpired:
        return f"the agent was not ready after {seconds:g} s"
    return None if (folder / "world.py").is_file() else "there is no world.py"


def fault_of(folder: Path, tools: list[str], calls: int) -> str | None:
    """What is wrong with the environment in a folder; None = nothing."""
    for command in (["check"], ["attack", "--budget", "200"]):
        words = [sys.executable, "-m", "agentrl.cli", "envs", command[0], "world:World", *command[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            return f"agentrl envs {command[0]}: " + (done.stdout + done.stderr).strip()[-1500:]
    told = subprocess.run(
        [sys.executable, __file__, "--describe", folder],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if told.returncode != 0:
        return told.stderr.strip()[-500:]
    found = json.loads(told.stdout)
    if sorted(found["tools"]) != sorted(tools):
        return f"its tools are {', '.join(found['tools'])}; {', '.join(tools)} were asked for"
    if found["calls"] < calls:
        return f"its expert calls tools {found['calls']:.1f} times an episode; {calls} and more are needed"
    return None


def describe(folder: Path) -> dict[str, object]:
    """The tools of the environment in a folder, and the mean number of calls of its expert."""
    sys.path.insert(0, str(folder))
    make = find("world:World").make

    async def calls(env: Env, task: Task) -> int:
        episode = await play(env, ScriptedAgent(env.expert(task)), task)
        return sum(len(turn.action.tool_calls) for turn in episode.turns)

    env = make()
    if not isinstance(env, Env):
        raise click.ClickException("World is no environment of one agent.")
    counts = [asyncio.run(calls(env, task)) for task in env.tasks("train")[:16]]
    return {"tools": [schema.name for schema in env.tool_schemas], "calls": sum(counts) / len(counts)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--agent", default="true", help="The agent's command, for bash; its folder has PROMPT.md and SKILL.md."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default="runs/authors", help="Where the folders are made."
)
@click.option("--only", multiple=True, help="Names of tasks; none = all.")
@click.option("--seconds", type=float, default=1800.0, help="The longest that an agent may take for a task.")
@click.option("--score-only", is_flag=True, help="The folders exist: score what is in them.")
@click.option("--describe", "described", type=click.Path(path_type=Path), hidden=True)
def main(
    agent: str, out: Path, only: tuple[str, ...], seconds: float, score_only: bool, described: Path | None
) -> None:
    """Have an agent write ten environments, and count those that are sound."""
    if described is not None:
        click.echo(json.dumps(describe(described)))
        return
    tasks = json.loads((HERE / "tasks.json").read_text(encoding="utf-8"))
    if unknown := set(only) - {task["name"] for task in tasks}:
        raise click.UsageError(
            f"no task {min(unknown)}; there are {', '.join(task['name'] for task in tasks)}."
        )
    tasks = [task for task in tasks if not only or task["name"] in only]
    faults = {}
    for task in tasks:
        folder = out / task["name"]
        fault = None if score_only else _written(agent, folder, task["prompt"], seconds)
        faults[task["name"]] = fault or fault_of(folder, task["tools"], task["calls"])
        click.echo(f"{task['name']}: {faults[task['name']] or 'sound'}", err=True)
    sound = [name for name, fault in faults.items() if fault is None]
    click.echo(json.dumps({"sound": len(sound), "of": len(tasks), "faults": faults}, indent=2))


if __name__ == "__main__":
    main()
