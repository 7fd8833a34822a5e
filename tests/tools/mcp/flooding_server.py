"""An MCP server that floods its client: over stdio as a program, over HTTP by `reply_to`.

    python flooding_server.py [LIST]

Its tools are the keys of RESULTS and LINES: what they answer, and what they write before they answer. LIST is
a key of LISTS: what it answers instead of its list of tools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import cast

TEXT = b'{"type":"text","text":""}'


def _list(*items: bytes) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _content(*blocks: bytes) -> bytes:
    return b'{"content":' + _list(*blocks) + b"}"


def _structured(value: bytes) -> bytes:
    return b'{"content":[],"structuredContent":{"a":' + value + b"}}"


MINIMAL = b'{"name":"t%d","inputSchema":{"type":"object"}}'
RESULTS = {
    "text": lambda: _content(b'{"type":"text","text":"' + b"," * 16_000_000 + b'"}'),
    "escapes": lambda: _content(b'{"type":"text","text":"' + b"\\u00e4" * 2_600_000 + b'"}'),
    "quotes": lambda: _structured(b"[" + b'"",' * 5_000_000 + b"1]"),
    "lists": lambda: _structured(_list(*[b"[]"] * 95_000)),
    "keys": lambda: _structured(b"{" + b",".join(b'"k%d":1' % n for n in range(180_000)) + b"}"),
    "blocks": lambda: _content(*[TEXT] * 60_000),
    "bad_blocks": lambda: _content(*[b'{"type":"text"}'] * 90_000),
    "empty_blocks": lambda: _content(*[b"{}"] * 95_000),
    "numbers": lambda: _content(*[b"1"] * 190_000),
}
LISTS = {
    "many_tools": lambda: _list(*(MINIMAL % n for n in range(45_000))),
    "bad_tools": lambda: _list(*[b"{}"] * 95_000),
    "no_tools": lambda: _list(*[b"1"] * 190_000),
    "large_schemas": lambda: _list(*map(_large, range(250))),
}
LINES = {
    "junk": lambda: b"x\n" * 2_000_000,
    "blank": lambda: b"\n" * 2_000_000,
    "bad_notes": lambda: _note(b'{"level":["x"],"data":' + _list(*[b"[]"] * 90_000) + b"}") * 3,
    "overlong": lambda: b"z" * 40_000_000 + b"\n",
}


def _large(number: int) -> bytes:
    properties = b",".join(b'"p%d":{}' % n for n in range(350))
    return b'{"name":"t%d","inputSchema":{"type":"object","properties":{%b}}}' % (number, properties)


def _note(params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","method":"notifications/message","params":' + params + b"}\n"


def reply_to(message: Mapping[str, object], listed: str = "") -> bytes:
    """The reply to a request."""
    method, params = message.get("method"), cast(dict[str, str], message.get("params", {}))
    id = cast(int, message["id"])
    if method == "initialize":
        info = {"name": "flooding", "version": "1"}
        version = params["protocolVersion"]
        facts = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        result = json.dumps(facts).encode()
    elif method == "tools/list":
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in (*RESULTS, *LINES)]
        result = b'{"tools":' + (LISTS[listed]() if listed else json.dumps(tools).encode()) + b"}"
    elif method == "tools/call":
        result = RESULTS.get(params["name"], lambda: _content(TEXT))()
    else:
        error = json.dumps({"code": -32601, "message": "Method not found"}).encode()
        return b'{"jsonrpc":"2.0","id":%d,"error":%b}' % (id, error)
    return b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (id, result)


def main() -> None:
    """Serve over stdio."""
    listed = sys.argv[1] if len(sys.argv) > 1 else ""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            if message.get("method") == "tools/call":
                sys.stdout.buffer.write(LINES.get(message["params"]["name"], bytes)())
            sys.stdout.buffer.write(reply_to(message, listed) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
