"""How often an attack succeeds: the rate of two scripted agents on one suite of AgentDojo, or of a model.

python attack_success.py Slack important_instructions
python attack_success.py Slack important_instructions --model MODEL
"""

import argparse
import asyncio

import agentrl


def options():
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=("Banking", "Slack", "Travel", "Workspace"))
    parser.add_argument("attack", help="important_instructions, ignore_previous, direct, ...")
    parser.add_argument("--n", type=int, help="pairs of tasks to play; left out, all")
    parser.add_argument("--model", help="directory of a model; left out, two scripts are played")
    return parser.parse_args()


async def scripted(make, script, tasks):
    """The utility and the rate of success of an environment's script: means over tasks."""

    async def episode(task):
        env = make()
        agent = agentrl.ScriptedAgent(getattr(env, script)(task))
        return await agentrl.play(env, agent, task)

    episodes = [await episode(task) for task in tasks]
    utility = sum(episode.total_of() or 0.0 for episode in episodes)
    hijacked = sum(episode.counts.get("attack_success", 0) for episode in episodes)
    return utility / len(tasks), hijacked / len(tasks)


def main():
    """Print a line for each agent."""
    chosen = options()
    env_id = f"AgentDojo{chosen.suite}-v0"
    arguments = {"attack": chosen.attack}
    tasks = agentrl.make(env_id, **arguments).tasks("test")[: chosen.n]
    print(f"{env_id}, {chosen.attack}: {len(tasks)} pairs of a user task and an injection task")
    if chosen.model is not None:
        report = agentrl.evaluate(env_id, chosen.model, n=len(tasks), temperature=0.0, env_kwargs=arguments)
        rates = {chosen.model: (report.mean, report.parts["attack_success"])}
    else:
        rates = {
            script: asyncio.run(scripted(lambda: agentrl.make(env_id, **arguments), script, tasks))
            for script in ("expert", "hijacked_expert")
        }
    for agent, (utility, success) in rates.items():
        print(f"{agent:16} utility {utility:.3f}   attack success {success:.3f}")


if __name__ == "__main__":
    main()
