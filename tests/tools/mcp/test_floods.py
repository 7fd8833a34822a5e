"""What a hostile server sends is cut or refused, and no step of the event loop takes long."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager

import pytest

from agentrl.errors import ToolDefinitionError, ToolError, ToolRejected
from agentrl.tools.mcp import McpTools
from tests.hostile import attacking, measured, replied
from tests.tools.mcp import flooding_server
from tests.tools.mcp.flooding_server import LINES, LISTS, reply_to
from tests.tools.mcp.watching import opened

SERVER = flooding_server.__file__
# Over HTTP the SDK itself parses replies, in the event loop.
MAX_STEP_S = {"stdio": 0.5, "http": 1.0}
NOT_SHOWN = 1_000
TOO_MANY = "the answer has more than 200,000 values; ask for less"
RESULTS = {
    "text": "," * 16_000_000,
    "escapes": "ä" * 2_600_000,
    "quotes": TOO_MANY,
    "lists": json.dumps({"a": [[]] * 95_000}),
    "keys": json.dumps({"a": {f"k{n}": 1 for n in range(180_000)}}),
    "blocks": "\n" * NOT_SHOWN + "[59,000 more parts not shown]",
    "bad_blocks": "answered what MCP does not allow: content.0.TextContent.text: field required",
    "empty_blocks": "answered what MCP does not allow: content.0.TextContent.text: field required",
    "numbers": "answered what MCP does not allow: content.0.TextContent: input should be a valid dictionary",
}


@contextmanager
def flooding(transport, listed=""):
    """A toolkit over the server."""
    if transport == "stdio":
        yield McpTools(command=sys.executable, args=[SERVER, *filter(None, [listed])], start_timeout_s=60)
        return

    def answer(path, body):
        message = json.loads(body) if body else {}
        if "id" not in message:
            return [b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"]
        return replied(reply_to(message, listed))

    with attacking(answer) as server:
        yield McpTools(url=f"{server.url}/mcp", start_timeout_s=60)


async def result_of(tool):
    try:
        return await tool.invoke({})
    except (ToolError, ToolRejected) as error:
        return str(error)


@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize("name", RESULTS)
async def test_a_flood_of_results_does_not_hold_the_event_loop(transport, name, monkeypatch):
    with flooding(transport) as toolkit:
        async with opened(toolkit) as tools:
            with measured(monkeypatch) as cost:
                text = await result_of(tools[name])
            assert RESULTS[name] in text
            assert len(text) <= len(RESULTS[name]) + 200
            assert cost.longest_s < MAX_STEP_S[transport]
            if transport == "stdio":
                assert await result_of(tools["blank"]) == "The tool returned nothing."


@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize("listed", LISTS)
async def test_a_flood_of_tools_does_not_hold_the_event_loop(transport, listed, monkeypatch):
    sentences = r"more than 256 tools|cannot be offered|more than 50,000 values"
    refused = pytest.raises((ToolError, ToolDefinitionError), match=sentences)
    with flooding(transport, listed) as toolkit, measured(monkeypatch) as cost, refused:
        async with opened(toolkit):
            pass
    assert cost.longest_s < MAX_STEP_S[transport]


@pytest.mark.parametrize("name", LINES)
async def test_a_flood_of_lines_does_not_hold_the_event_loop(name, monkeypatch):
    with flooding("stdio") as toolkit:
        async with opened(toolkit) as tools:
            with measured(monkeypatch) as cost:
                text = await result_of(tools[name])
            expected = {
                "junk": "it wrote 'x', which is no message of MCP",
                "overlong": "more than 16,777,216 bytes",
            }
            assert expected.get(name, "The tool returned nothing.") in text
    assert cost.longest_s < MAX_STEP_S["stdio"] / 2
