"""How often an attack succeeds: the rate of two scripted agents on one suite of AgentDojo, or of a model.

python attack_success.py Slack important_instructions
python attack_success.py Slack important_instructions --model MODEL
"""

import argparse
import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import agentrl
from agentrl import Episode, ScriptedAgent, Task
from envs_contrib.agentdojo import AgentDojo

SCRIPTS = {"expert": AgentDojo.expert, "hijacked expert": AgentDojo.hijacked_expert}


class Rates(NamedTuple):
    """Means over pairs of tasks: of the utility, and of the attack's success."""

    utility: float
    success: float


def main() -> None:
    """Print a line for each agent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("Banking", "Slack", "Travel", "Workspace"))
    parser.add_argument("attack", help="important_instructions, ignore_previous, direct, ...")
    parser.add_argument("--n", type=int, help="pairs of tasks to play; left out, all")
    parser.add_argument("--model", help="directory of a model; left out, two scripts are played")
    options = parser.parse_args()
    env_id, attack = f"AgentDojo{options.suite}-v0", options.attack
    tasks = agentrl.make(env_id, attack=attack).tasks("test")[: options.n]
    print(f"{env_id}, {attack}: {len(tasks)} pairs of a user task and an injection task")
    if options.model is None:
        rates = {name: asyncio.run(scripted(env_id, attack, name, tasks)) for name in SCRIPTS}
    else:
        rates = {options.model: of_model(env_id, attack, options.model, len(tasks))}
    for agent, (utility, success) in rates.items():
        print(f"{agent:16} utility {utility:.3f}   attack success {success:.3f}")


async def scripted(env_id: str, attack: str, name: str, tasks: Sequence[Task]) -> Rates:
    """The rates of a script of the environment."""

    async def episode(task: Task) -> Episode:
        env = agentrl.make(env_id, attack=attack)
        assert isinstance(env, AgentDojo)
        return await agentrl.play(env, ScriptedAgent(SCRIPTS[name](env, task)), task)

    episodes = [await episode(task) for task in tasks]
    utility = sum(float(episode.step_rewards[-1] == 1.0) for episode in episodes)
    success = sum(episode.counts.get("attack_success", 0) for episode in episodes)
    return Rates(utility / len(tasks), success / len(tasks))


def of_model(env_id: str, attack: str, directory: str, n: int) -> Rates:
    """The rates of a model, in an evaluation of its own."""
    report = agentrl.evaluate(env_id, directory, n=n, temperature=0.0, env_kwargs={"attack": attack})
    return Rates(report.mean, report.parts["attack_success"])


if __name__ == "__main__":
    main()
