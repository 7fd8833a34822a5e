"""One world twice: as an environment, and as an agent with a loop of its own; each message has its twin."""

from __future__ import annotations

import json
import random

import httpx2

from agentrl import Env, Limits, Message, Step, Tags, Task, ToolRejected, call, say
from agentrl.envs.gateway import HarnessEnv
from agentrl.tools import calculate
from agentrl.types.seams import ToolSchema

EXPRESSION = {"expression": {"type": "string"}}
CALC = ToolSchema(
    "calc", "Compute.", {"type": "object", "properties": EXPRESSION, "required": ["expression"]}
)
LIMITS = {"max_turns": 4, "max_tokens": 96}


def problems(split):
    """Sums of two small numbers."""
    rng = random.Random(split)
    for number in range(64):
        a, b = rng.randrange(20), rng.randrange(20)
        yield Task.ask(f"{split}-{number}", f"{a} and {b} is", answer=str(a + b), sum=f"{a}+{b}")


def result_of(arguments):
    """What the tool returns."""
    try:
        return calculate(str(arguments.get("expression")))
    except ToolRejected as error:
        return str(error)[:20]


class _World:
    """What both are made of."""

    dialect = Tags()

    def tasks(self, split):
        return list(problems(split))

    def expert(self, task):
        result = yield call("calc", expression=task.metadata["sum"])
        yield say(result)


class Native(_World, Env):
    """The world as an environment: a turn without a call is the answer."""

    limits = LIMITS
    task = None

    @property
    def tool_schemas(self):
        return (CALC,)

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        self.task = task
        return task.prompt, {}

    async def step(self, action):
        calls = [each for each in action.tool_calls if each.arguments is not None]
        if not calls:
            return Step.finished(reward=float(action.text.strip() == self.task.answer))
        return Step.going(
            *(Message("tool", result_of(c.arguments), tool_call_id=c.id, name=c.name) for c in calls)
        )


class Harness(_World, HarnessEnv):
    """The same world as an agent, which knows nothing of environments."""

    limits = Limits(**LIMITS, reset_timeout_s=None, step_timeout_s=None)
    tools = (CALC,)

    async def agent(self, base_url, key, task):
        tools = [{"type": "function", "function": CALC._asdict()}]
        messages = [{"role": "user", "content": task.prompt[0].text}]
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
            while True:
                body = {"model": "m", "messages": messages, "tools": tools}
                reply = await client.post(f"{base_url}/chat/completions", json=body)
                if reply.status_code != 200:
                    return None
                choice = reply.json()["choices"][0]
                message = choice["message"]
                if choice["finish_reason"] == "length":
                    return None
                messages.append(message)
                if not message.get("tool_calls"):
                    return message["content"]
                for each in message["tool_calls"]:
                    result = result_of(json.loads(each["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})

    def grade(self, task, answer, files):
        return float(answer.strip() == task.answer)
