"""verifiers' side of the benchmark: plays all episodes whenever a line arrives on standard input.

    PYTHON player.py SETTINGS

SETTINGS: JSON with `config`, of verifiers' own `EvalConfig`, and `folder`. It does what `vf-eval` does after
its set-up: the environment serves its tools and its interception servers once, then every episode is run by
`Env.run_slot` and appended to traces.jsonl. It prints its resolved configuration, then one line of JSON after
each round.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment
from verifiers.v1.utils.trace_store import append_episode


async def play(config: EvalConfig, folder: Path) -> None:
    """Play all tasks once for every line of standard input."""
    env = load_environment(config.env)
    tasks = list(env.taskset)
    context = ModelContext(client=config.client, model=config.model, sampling=config.sampling)
    lock = asyncio.Lock()

    async def save(episode: vf.Episode) -> None:
        await append_episode(folder, episode, lock)

    async with env.serving():
        _print({"config": config.model_dump(mode="json")})
        while await asyncio.to_thread(sys.stdin.readline):
            slots = [slot for task in tasks for slot in env.slots(task)]
            semaphore = asyncio.Semaphore(config.max_concurrent)
            episodes = await asyncio.gather(*(env.run_slot(slot, context, semaphore, save) for slot in slots))
            _print(_summary(episodes))


def _summary(episodes: Sequence[vf.Episode]) -> dict[str, object]:
    traces = [trace for episode in episodes for trace in episode.traces]
    errors = [error for episode in episodes for error in episode.errors]
    errors += [error for trace in traces for error in trace.errors]
    return {
        "episodes": sum(episode.ok for episode in episodes),
        "solved": sum(trace.reward for trace in traces),
        "turns": sum(trace.num_turns for trace in traces),
        "error": str(errors[0]) if errors else None,
    }


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: list[str]) -> None:
    """Play until standard input ends."""
    settings = json.loads(arguments[0])
    asyncio.run(play(EvalConfig.model_validate(settings["config"]), Path(settings["folder"])))


if __name__ == "__main__":
    main(sys.argv[1:])
