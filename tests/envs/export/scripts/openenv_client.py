"""The client of an exported folder plays task 1 of the world that its server serves."""

import json
import sys

from calculator import CalculatorEnv

with CalculatorEnv(base_url=sys.argv[1]).sync() as env:
    shown = env.reset(seed=1).observation
    call = {"type": "call_tool", "tool_name": "calc", "arguments": {"expression": "1 + 1"}}
    assert env.step(call).observation["result"] == "2"
    last = env.step({"message": "not a number"})
    messages = shown["messages"]
    print(json.dumps([messages[-1]["content"], last.reward, last.done]))
