"""Write conversations for SFT: the demonstrator of Calculator-v0, played, as messages with tool calls.

python examples/sft_then_rl/demonstrate.py 8000
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import agentrl
from agentrl import Episode, Message, ScriptedAgent
from envs_contrib.calculator import Calculator

FILE = Path(__file__).with_name("conversations.jsonl")


def as_json(message: Message, number: int) -> dict[str, object]:
    """A message in the form of OpenAI's API; number: of its turn, which makes the id of its call."""
    row: dict[str, object] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        row["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments or {}))},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = f"call_{number - 1}"
    return row


def conversation(episode: Episode) -> dict[str, object]:
    """A row: the messages of an episode."""
    turns = enumerate(episode.turns)
    return {"messages": [as_json(m, n) for n, turn in turns for m in (*turn.observation, turn.action)]}


async def play(number: int) -> list[Episode]:
    """Demonstrations of the first problems of the split `demo`."""
    tasks = Calculator().tasks("demo")
    episodes = []
    for index in range(number):
        env, task = Calculator(), tasks[index % len(tasks)]
        script = env.demonstrator(task, random.Random(index))
        episodes.append(await agentrl.play(env, ScriptedAgent(script), task))
    return episodes


def main(number: int) -> None:
    """Write that many conversations."""
    with FILE.open("w", encoding="utf-8") as file:
        for episode in asyncio.run(play(number)):
            print(json.dumps(conversation(episode)), file=file)
    print(f"{number} conversations: {FILE}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
