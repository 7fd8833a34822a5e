"""An MCP server without the SDK: small, quick to start, with the faults that its arguments name.

    python raw_server.py [mute] [ends] [stays] [stubborn] [chatty] [loops] [floods] [bloats]

mute: never answers. ends: writes the reason to stderr and ends at once. stays: does not end when its stdin
is closed.
stubborn: ignores SIGTERM. chatty: writes a line that is no message before it begins. loops: its list of tools
has no end. garbles: some of its tools are described by what MCP does not allow, between two that are not;
garbles_all: its only tool is. floods: it lists 2,000 tools. bloats: its schemas have 100,000 values.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REMEMBERED: list[str] = []


def remember(text: str) -> str:
    """Remember a text and return all that is remembered."""
    REMEMBERED.append(text)
    return " ".join(REMEMBERED)


def hang(mark: str) -> str:
    """Write the pid to a file, then hang."""
    with open(mark, "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    return ""


def spawn(kind: str) -> str:
    """Start a child that does not end by itself; return the pids of the server and of that child."""
    argv = ["sleep", "600"]
    if kind == "stubborn":
        argv = [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)",
        ]
    child = subprocess.Popen(argv, start_new_session=kind != "plain")
    while kind == "stubborn" and not _ignores_sigterm(child.pid):
        time.sleep(0.01)
    return f"{os.getpid()} {child.pid}"


def _ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def die(words: str) -> str:
    """End in the middle of a call."""
    print(words, file=sys.stderr, flush=True)
    os._exit(3)


def babble(line: str) -> str:
    """Write a line that is no message, then hang."""
    print(line, flush=True)
    time.sleep(600)
    return ""


def flood(characters: int) -> str:
    """Return a long text."""
    return "x" * characters


def environment() -> str:
    """Return all that is in the environment."""
    # As the kernel has it: Python adds a locale to its own copy.
    with open("/proc/self/environ", encoding="utf-8") as file:
        return file.read()


TOOLS = {tool.__name__: tool for tool in (remember, hang, spawn, die, babble, flood, environment)}
KINDS = {"str": "string", "int": "integer"}


def described(function: object) -> dict[str, object]:
    hints = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    properties = {name: {"type": KINDS[kind]} for name, kind in hints.items()}
    schema = {"type": "object", "properties": properties, "required": list(hints)}
    return {"name": function.__name__, "description": function.__doc__, "inputSchema": schema}


RAW = {
    "picture": {
        "content": [
            {"type": "text", "text": "a dot"},
            {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"},
            {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
            {"type": "resource_link", "name": "log", "uri": "file:///log.txt"},
            {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "twelve chars"}},
            {"type": "resource", "resource": {"uri": "file:///b.bin", "blob": "AAA="}},
        ]
    },
    "structured": {"content": [], "structuredContent": {"sum": 3, "of": ["ä"]}},
    "nothing": {"content": []},
    "fails": {"content": [{"type": "text", "text": "no such table: cats"}], "isError": True},
    "fails_silently": {"content": [], "isError": True},
    "nonsense": {"answer": 42},
    "blocks": {"content": [{"type": "text", "text": "a"}] * 1_500},
    "values": {"content": [], "structuredContent": {"of": [[]] * 300_000}},
    "unlike": {"content": [], "structuredContent": {"text": "a" * 40 + "b"}},
}
ERRORS = {
    "invalid": (-32602, "`day` must be in the past"),
    "internal": (-32603, "KeyError: 'x'"),
    "upstream": (-32000, "Connection closed"),
}
# An output schema that would take a backtracking engine minutes.
BACKTRACKING = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a|a)*$"}}}


GARBLED = [
    {"name": "no_schema", "description": "Without an input schema."},
    {"name": "a_list", "inputSchema": ["a", "list"]},
    {"name": "no_object", "inputSchema": {"type": "array"}},
    {"name": "wrong_text", "description": 7, "inputSchema": {"type": "object"}},
    {"name": "wrong_type", "inputSchema": {"type": "object", "properties": {"day": {"type": "date"}}}},
    {"description": "Without a name.", "inputSchema": {"type": "object"}},
    "no tool at all",
]


def listed() -> list[dict[str, object]]:
    minimal = {"inputSchema": {"type": "object"}, "description": "As its name says."}
    if "floods" in sys.argv:
        return [{"name": f"tool_{number}", **minimal} for number in range(2_000)]
    if "bloats" in sys.argv:
        values = {"type": "object", "properties": {f"p{number}": {} for number in range(8_000)}}
        return [{"name": f"tool_{number}", "inputSchema": values} for number in range(10)]
    if "garbles" in sys.argv:
        return [described(remember), *GARBLED, described(flood)]
    if "garbles_all" in sys.argv:
        return GARBLED[:1]
    tools = [described(tool) for tool in TOOLS.values()]
    tools += [{"name": name, **minimal} for name in {**RAW, **ERRORS} if name != "unlike"]
    return [*tools, {"name": "unlike", **minimal, "outputSchema": BACKTRACKING}]


def answer(message: dict) -> dict[str, object]:
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        info = {"name": "raw", "version": "1"}
        version = params["protocolVersion"]
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":
        more = {"nextCursor": "again"} if "loops" in sys.argv else {}
        return {"result": {"tools": listed(), **more}}
    if method != "tools/call":
        return {"error": {"code": -32601, "message": "Method not found"}}
    name = params["name"]
    if name in ERRORS:
        code, text = ERRORS[name]
        return {"error": {"code": code, "message": text}}
    if name in RAW:
        return {"result": RAW[name]}
    text = TOOLS[name](**params.get("arguments", {}))
    return {"result": {"content": [{"type": "text", "text": text}]}}


def main() -> None:
    if "ends" in sys.argv:
        sys.exit("the licence has expired\n")
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "chatty" in sys.argv:
        print("Welcome to raw 1.0!", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "mute" not in sys.argv:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer(message)}), flush=True)
    if "stays" in sys.argv:
        time.sleep(600)


if __name__ == "__main__":
    main()
