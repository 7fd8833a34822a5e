"""An expert whose tool is broken loses, and fails no episode: what tools earn is measured with it."""

from __future__ import annotations

import pytest

from agentrl import ScriptedAgent, play
from agentrl.envs.registry import find
from agentrl.evaluation.broken_tools import HOW, BrokenTool

WORLDS = ("HopSearch", "SearchR1", "Sql", "Calculator", "Desk", "Meetings", "Spreadsheet", "Website")


@pytest.mark.parametrize("world", WORLDS)
async def test_no_way_to_break_a_tool_fails_the_experts_episode(world):
    make = find(f"{world}-v0").factory()
    # A slow one takes its whole time.
    breaks = [BrokenTool(tool.name, how) for tool in make().tool_schemas for how in HOW if how != "slow"]
    for broken in breaks:
        make_env = broken.breaking(make)
        for number in (0, 7):
            env = make_env()
            task = env.tasks(env.splits[0])[number]
            episode = await play(env, ScriptedAgent(env.expert(task)), task)
            assert episode.failure is None, (broken.name, episode.failure)
