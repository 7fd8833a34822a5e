"""`vf-eval` of verifiers 0.4 plays exported packages, whose model says what experts say, or not."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import verifiers.v1 as vf
from endpoint import Scripted, reply_of
from verifiers.v1.cli.eval.main import main as vf_eval
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.utils.loaders import taskset_config_type

from agentrl import ScriptedAgent, make, play, say
from agentrl.envs import score
from agentrl.envs.export.on_tasksets import EpisodeState
from agentrl.errors import UserError

OUT = Path(sys.argv[1])


class Endpoint(BaseHTTPRequestHandler):
    """An endpoint on this machine; `script` is from the messages of a prompt to a script."""

    replies = None
    seconds = 0.0
    status = 200

    def do_POST(self):
        content = self.rfile.read(int(self.headers["content-length"]))
        time.sleep(self.seconds)
        reply = self.replies(httpx.Request("POST", "http://127.0.0.1", content=content)).content
        self.send_response(self.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


def evaluated(package, script, *flags, seconds=0.0, status=200, replies=None):
    """What the traces of a run tell."""
    Endpoint.replies = staticmethod(replies or Scripted(script))
    Endpoint.seconds, Endpoint.status = seconds, status
    run = f"run-{len(list(OUT.iterdir()))}"
    own = ["--model", "m", "--client.base-url", URL, "--output-dir", str(OUT), "--run.name", run, "--no-push"]
    with contextlib.redirect_stdout(sys.stderr):
        vf_eval([package, *own, "--no-rich", *flags])
    rows = [json.loads(line) for line in (OUT / run / "traces.jsonl").read_text().splitlines()]
    return [told(trace) for row in rows for trace in row["traces"]]


def told(trace):
    reward = (trace["rewards"].get("total") or {}).get("score")
    errors = [error["message"] for error in trace["errors"]]
    roles = [node["message"]["role"] for node in trace["nodes"]]
    return {
        "task": trace["task"]["data"]["id"],
        "reward": reward,
        "parts": trace["metrics"],
        "stop": trace["stop_condition"],
        "errors": errors,
        "roles": roles,
    }


async def own(env_id, scripts):
    """Score and parts of agentrl's own episodes of the first tasks."""
    found = []
    for number, script in enumerate(scripts):
        env = make(env_id)
        task = env.tasks("test")[number]
        episode = await play(env, ScriptedAgent(script), task, seed=number)
        verdict = (await score([episode], env.rewards)).verdicts[0]
        found.append({"task": task.id, "reward": verdict.total, "parts": dict(verdict.parts)})
    return found


def compared(env_id, package, num_tasks):
    """What both make of the expert's actions, and of wrong ones."""
    env = make(env_id)
    tasks = env.tasks("test")[:num_tasks]
    by_prompt = {task.prompt[-1].text: task for task in tasks}
    wrong = [say("I do not know.")] * 20
    for script, ours in (
        (lambda prompt: env.expert(by_prompt[prompt[-1]["content"]]), [env.expert(task) for task in tasks]),
        (lambda prompt: wrong, [wrong] * num_tasks),
    ):
        theirs = evaluated(package, script, "--env.taskset.split", "test", "-n", str(num_tasks))
        yield (
            sorted(theirs, key=lambda row: row["task"]),
            sorted(asyncio.run(own(env_id, ours)), key=lambda row: row["task"]),
        )


def say_wrong(prompt):
    return [say("zzzzz")] * 20


def failing():
    """A world that fails, an endpoint that fails, limits of verifiers, what is refused."""
    wordle = make("Wordle-v0", num_words=50)
    task = wordle.tasks("test")[0]
    first = ["--env.taskset.split", "test", "-n", "1"]
    turns = [*first, "--env.agent.max-turns", "2"]
    deadline = [*first, "--env.agent.timeout.rollout", "3"]
    yield "broken", evaluated("broken-world", lambda prompt: [say("once"), say("twice")])
    yield "refused", evaluated("wordle", say_wrong, *first, status=400)
    yield "turns", evaluated("wordle", say_wrong, *turns)
    yield "deadline", evaluated("wordle", say_wrong, *deadline, seconds=1.2)
    few = [*first, "--env.taskset.arguments", '{"num_words": 50}']
    yield "few words", evaluated("wordle", lambda prompt: wordle.expert(task), *few)
    (task,) = vf.load_taskset(taskset_config_type("wordle")(id="wordle")).take(1)
    trace = vf.Trace(
        task=vf.TraceTask(type="EpisodeTask", data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=EpisodeState(),
    )
    asked = []

    def replies(request):
        asked.append(json.loads(request.content)["messages"])
        message = {"role": "assistant", "content": "a picture"}
        return httpx.Response(200, json=reply_of(message, "stop"))

    yield "shown", [evaluated("pictured-world", None, replies=replies), asked]
    yield "served", asyncio.run(served())
    yield "unplayed", raised(lambda: asyncio.run(task.score(trace)))
    config = taskset_config_type("wordle")(id="wordle", system_prompt=__file__)
    yield "prompted", raised(lambda: vf.load_taskset(config))


async def served():
    """Rewards of episodes that a trainer asks of an environment server, in the order of its tasks."""
    hop = make("HopSearch-v0")
    by_prompt = {task.prompt[-1].text: task for task in hop.tasks("test")[:2]}
    Endpoint.replies = Scripted(lambda prompt: hop.expert(by_prompt[prompt[-1]["content"]]))
    Endpoint.seconds, Endpoint.status = 0.0, 200
    config = vf.resolve_env_config({"taskset": {"id": "hop-search", "split": "test"}})
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    running, client = asyncio.create_task(server.run()), EnvClient(server.address)
    await client.wait_for_server_startup()
    model = vf.EvalClientConfig(base_url=URL), "m", vf.SamplingConfig()
    tasks = [task.data.model_dump() for task in vf.load_taskset(config.taskset).take(2)]
    episodes = await asyncio.gather(*(client.run(*model, task) for task in tasks))
    await client.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return [episode.traces[0].reward for episode in episodes]


def raised(call):
    try:
        call()
    except (UserError, vf.RolloutError) as error:
        return str(error)
    return ""


SERVER = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=SERVER.serve_forever, daemon=True).start()
URL = f"http://127.0.0.1:{SERVER.server_port}/v1"
GAMES = {
    "HopSearch-v0": ("hop-search", 3),
    "CalendarQuestions-v0": ("calendar-questions", 3),
    "Wordle-v0": ("wordle", 1),
}
pairs = {name: list(compared(name, *of)) for name, of in GAMES.items()}
print(json.dumps({"pairs": pairs, **dict(failing())}))
