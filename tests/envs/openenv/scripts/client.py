"""OpenEnv's own clients play the tasks of a served Calculator, with the actions of its expert."""

import asyncio
import json
import sys

from openenv.core.env_server.types import Action
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

URL, KEY = sys.argv[1:3]
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Say(Action):
    message: str


async def generic(number, expressions):
    async with GenericEnvClient(base_url=URL, headers=HEADERS) as env:
        result = await env.reset(seed=number)
        for expression in expressions:
            call = {"type": "call_tool", "tool_name": "calc", "arguments": {"expression": expression}}
            result = await env.step(call)
        result = await env.step({"message": result.observation["result"]})
        return [result.reward, result.done, (await env.state())["step_count"]]


async def over_mcp(number, expressions):
    async with MCPToolClient(base_url=URL, headers=HEADERS) as env:
        await env.reset(seed=number)
        assert [tool.name for tool in await env.list_tools()] == ["calc"]
        for expression in expressions:
            answer = await env.call_tool("calc", expression=expression)
        result = await env.step(Say(message=answer))
        return [result.reward, result.done, (await env.state()).step_count]


async def refused():
    try:
        async with GenericEnvClient(base_url=URL) as env:
            await env.reset()
    except ConnectionError as error:
        return str(error)


async def full(num_places):
    # A place is free when the server has seen that its client is gone.
    await asyncio.sleep(1.0)
    clients = [GenericEnvClient(base_url=URL, headers=HEADERS) for _ in range(num_places + 1)]
    try:
        for client in clients:
            await client.connect()
        return [
            str(each)
            for each in await asyncio.gather(*(c.reset(seed=0) for c in clients), return_exceptions=True)
        ]
    finally:
        for client in clients:
            await client.close()


async def main():
    tasks = json.loads(sys.stdin.readline())
    played = [[await generic(n, e), await over_mcp(n, e)] for n, e in enumerate(tasks)]
    print(json.dumps({"played": played, "refused": await refused(), "full": await full(4)}))


asyncio.run(main())
