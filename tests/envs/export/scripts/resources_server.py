"""NeMo Gym's own agents play an exported server over HTTP, with a model server that says what experts say."""

import asyncio
import importlib.util
import json
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
import yaml
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from omegaconf import OmegaConf
from responses_api_agents.gymnasium_agent.app import GymnasiumAgent, GymnasiumAgentConfig
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

from agentrl import make, say

AGENTS = {
    "simple_agent": (SimpleAgent, SimpleAgentConfig),
    "gymnasium_agent": (GymnasiumAgent, GymnasiumAgentConfig),
}
FOLDER, PACKAGE, ENV_ID = sys.argv[1:]
SERVER = Path(FOLDER) / "resources_servers" / PACKAGE
ROWS = [json.loads(line) for line in (SERVER / "data" / "example.jsonl").read_text().splitlines()]
CONFIG = yaml.safe_load((SERVER / "configs" / f"{PACKAGE}.yaml").read_text())
(KIND,) = CONFIG[next(name for name in CONFIG if "resources" not in name)]["responses_api_agents"]
ENV = make(ENV_ID)
TASKS = {task.id: task for split in ("train", "test") for task in ENV.tasks(split)}


class Model:
    """A model server: the session of a rollout is its own, so one script after another is played."""

    def __init__(self):
        self.script, self.is_new = None, True
        self.app = FastAPI()
        self.app.post("/v1/responses")(self.responses)

    def play(self, script):
        self.script, self.is_new = script, True

    async def responses(self, request: Request):
        body = await request.json()
        items = body["input"]
        own = [k for k, item in enumerate(items) if item.get("role") == "assistant" or "name" in item]
        last = own[-1] if own else -1
        text = "\n".join(item.get("output", item.get("content")) for item in items[last + 1 :])
        try:
            is_new = self.is_new or not hasattr(self.script, "send")
            action = next(self.script) if is_new else self.script.send(text)
        except StopIteration:
            action = say("")
        self.is_new = False
        output = [
            {"type": "function_call", "call_id": f"c{len(items)}", "name": call.name}
            | {"arguments": json.dumps(dict(call.arguments))}
            for call in action.tool_calls
        ]
        if not output:
            content = [{"type": "output_text", "text": action.text, "annotations": []}]
            said = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
            output = [{**said, "content": content}]
        reply = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": output}
        return {**reply, "parallel_tool_calls": True, "tool_choice": "auto", "tools": body.get("tools", [])}


@asynccontextmanager
async def served(app, port):
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    try:
        yield
    finally:
        server.should_exit = True
        await running


def free_ports(count):
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.bind(("127.0.0.1", 0))
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def client_of(ports):
    """NeMo Gym's client of the servers, which finds them by their names."""
    kinds = {
        "resources": "resources_servers",
        "agent": "responses_api_agents",
        "model": "responses_api_models",
    }
    known = {
        name: {kind: {name: {"entrypoint": "app.py", "host": "127.0.0.1", "port": ports[name]}}}
        for name, kind in kinds.items()
    }
    head = BaseServerConfig(host="127.0.0.1", port=1)
    return ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(known))


def servers(ports, client):
    """The exported server, and the agent that its configuration names."""
    spec = importlib.util.spec_from_file_location("exported_app", SERVER / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (server_class,) = [each for each in vars(module).values() if getattr(each, "env_id", "") == ENV_ID]
    common = {"host": "127.0.0.1", "entrypoint": "app.py"}
    own = BaseResourcesServerConfig(**common, port=ports["resources"], name="resources")
    agent_class, config_class = AGENTS[KIND]
    config = config_class(
        **common,
        port=ports["agent"],
        name="agent",
        max_steps=ENV.limits.max_turns,
        resources_server={"type": "resources_servers", "name": "resources"},
        model_server={"type": "responses_api_models", "name": "model"},
    )
    return server_class(config=own, server_client=client), agent_class(config=config, server_client=client)


async def main():
    http = set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    ports = dict(zip(("resources", "agent", "model"), free_ports(3), strict=True))
    client, model = client_of(ports), Model()
    server, agent = servers(ports, client)
    found = {"expert": [], "wrong": [], "parts": []}
    async with (
        served(server.setup_webserver(), ports["resources"]),
        served(agent.setup_webserver(), ports["agent"]),
        served(model.app, ports["model"]),
    ):
        for row in ROWS[:3]:
            task = TASKS[row["task"]]
            for kind, script in (("expert", ENV.expert(task)), ("wrong", iter([say("nothing")] * 30))):
                model.play(script)
                reply = await (await client.post(server_name="agent", url_path="/run", json=row)).json()
                found[kind].append(reply["reward"])
                found["parts"].append(reply.get("parts") or reply["info"]["parts"])
        for path, body in (("/seed_session", {**ROWS[0], "task": "none"}), ("/search", {"query": "x"})):
            refused = await client.post(server_name="resources", url_path=path, json=body)
            found.setdefault("refused", []).append(refused.status)
    await http.close()
    print(json.dumps({"agent": KIND, **found}))


asyncio.run(main())
