"""verifiers 0.3 plays exported packages, with the actions of their experts and with wrong ones."""

import asyncio
import json
import sys

import verifiers as vf
import worlds
from endpoint import endpoint
from verifiers.clients import OpenAIChatCompletionsClient

from agentrl import make, say
from agentrl.envs.export.on_verifiers import load

sys.path[:0] = sys.argv[1:]
HOP, WORDLE = make("HopSearch-v0"), make("Wordle-v0")
BY_PROMPT = {task.prompt[-1].text: task for task in HOP.tasks("test")}


def client(of, finish=None):
    return OpenAIChatCompletionsClient(endpoint(of, finish))


async def evaluated(env, of):
    found = await env.evaluate(client(of), "m", num_examples=4, on_progress=lambda *_: None)
    return [output["reward"] for output in found["outputs"]]


async def played(env, row, script, finish=None):
    columns = ["parts"] if env.env_id != "Broken-v0" else []
    rollout = await env.run_rollout(
        row, client(lambda prompt: script, finish), "m", {}, state_columns=columns
    )
    error = (rollout.get("error") or {}).get("error")
    said = [message["role"] for message in rollout["completion"]]
    return [rollout["reward"], rollout.get("parts"), rollout["is_truncated"], error, said]


async def main():
    hop = vf.load_environment("hop_search")
    expert = await evaluated(hop, lambda prompt: HOP.expert(BY_PROMPT[prompt[-1]["content"]]))
    wrong = await evaluated(hop, lambda prompt: [say("I do not know.")])
    wordle = vf.load_environment("wordle")
    rows, tasks = wordle.get_eval_dataset().to_list(), WORDLE.tasks("test")
    games = [await played(wordle, rows[k], WORDLE.expert(tasks[k])) for k in range(2)]
    lost = await played(wordle, rows[0], [say("zzzzz")] * 20)
    cut = await played(wordle, rows[0], WORDLE.expert(tasks[0]), "length")
    failing = load(f"{worlds.Broken.__name__}-v0")
    failed = await played(failing, failing.get_dataset().to_list()[0], [say("once"), say("twice")])
    found = {"expert": expert, "wrong": wrong, "games": games, "lost": lost, "cut": cut, "failed": failed}
    print(json.dumps(found))


asyncio.run(main())
