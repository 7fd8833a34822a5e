"""OpenEnv's rollout function for TRL plays a served Calculator: a scripted model calls the tools."""

import json
import sys

from openenv.core.env_server.mcp_types import Tool
from openenv.core.generic_client import GenericEnvClient
from openenv.core.harness import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStepResult,
    StepEnvSessionAdapter,
    build_harness_rollout_func,
)
from openenv.core.llm_client import LLMResponse, ToolCall

URL, KEY = sys.argv[1:3]
ANSWER = "answer"


def action_of(name, arguments):
    if name == ANSWER:
        return {"message": arguments["text"]}
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


class Factory:
    """A session for each prompt, which is the number of a task and what its expert computes."""

    def create(self, task, **named):
        client = GenericEnvClient(base_url=URL, headers={"Authorization": f"Bearer {KEY}"}).sync()
        client.connect()
        listed = client.step({"type": "list_tools"}).observation["tools"]
        text = {"type": "object", "properties": {"text": {"type": "string"}}}
        return StepEnvSessionAdapter(
            client,
            task=task,
            seed=task["seed"],
            tool_specs=[Tool(**each) for each in listed]
            + [Tool(name=ANSWER, description="Answer.", input_schema=text)],
            action_builder=action_of,
            initial_messages_builder=lambda result, task: result.observation["messages"],
        )


def model_of(trainer, session):
    """The expert: each expression of its prompt, then the last result."""
    left = list(session._task["expressions"])

    def step(messages, tools, sampling):
        assert [tool.name for tool in tools] == ["calc", ANSWER]
        assert messages[0]["role"] == "user"
        if left:
            call = ToolCall(id="1", name="calc", args={"expression": left.pop(0)})
        else:
            result = json.loads(messages[-1]["content"])["observation"]["result"]
            call = ToolCall(id="1", name=ANSWER, args={"text": result})
        response = LLMResponse(content="", tool_calls=[call])
        return ModelStepResult(response=response, prompt_ids=[1], completion_ids=[2], logprobs=[-0.5])

    return step


rollout_func = build_harness_rollout_func(
    session_factory=Factory(),
    harness_adapter=MCPHarnessAdapter(),
    model_step_builder=model_of,
    limits=HarnessRunLimits(max_turns=8),
)
tasks = json.loads(sys.stdin.readline())
rolled = rollout_func([{"seed": n, "expressions": each} for n, each in enumerate(tasks)], None)
print(json.dumps({"rewards": rolled["env_reward"], "turns": [len(ids) for ids in rolled["completion_ids"]]}))
