"""A published server, unmodified: mcp-server-time."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from agentrl import ScriptedAgent, call, play, say
from agentrl.errors import ToolError
from agentrl.tools import release_shared
from agentrl.tools.mcp import McpTools
from tests.tools.mcp.watching import Desk, opened, servers
from tests.worlds import ASK

TIME = str(Path(sys.executable).parent / "mcp-server-time")
WHEN = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Asia/Kolkata"}


async def test_episodes_use_a_published_server_and_leave_nothing():
    before = servers()
    toolkit = McpTools(command=TIME, args=["--local-timezone", "UTC"], stateful=False)

    def script(zone):
        converted = json.loads((yield call("convert_time", **{**WHEN, "target_timezone": zone})))
        assert converted["target"]["timezone"] == zone
        refused = yield call("get_current_time", timezone="Mars/Olympus")
        assert "Invalid timezone" in refused
        unfit = yield call("get_current_time")
        assert unfit.startswith("get_current_time: parameter `timezone` is missing")
        yield say("3" if converted["time_difference"] == "-3.5h" else converted["time_difference"])

    zones = ["Asia/Kolkata", "Asia/Colombo"] * 4
    episodes = await asyncio.gather(*(play(Desk(toolkit), ScriptedAgent(script(z)), ASK) for z in zones))
    assert [episode.step_rewards[-1] for episode in episodes] == [1.0] * len(zones)
    assert len(servers() - before) == 2  # the guard and one server
    await release_shared()
    assert servers() == before


async def test_its_schemas_and_its_error_texts_are_passed_on():
    async with opened(McpTools(command=TIME, args=["--local-timezone", "UTC"], prefix="time_")) as tools:
        assert set(tools) == {"time_get_current_time", "time_convert_time"}
        schema = tools["time_convert_time"].schema.parameters
        assert schema["required"] == ["source_timezone", "time", "target_timezone"]
    with pytest.raises(ToolError, match="its last words: Error: invalid --local-timezone 'Mars'"):
        async with opened(McpTools(command=TIME, args=["--local-timezone", "Mars"])):
            pass
