"""Checks that what a model writes reaches no file of the host, and that episodes connect to no other host.

A file with a secret is made outside of the world. Every text argument of every tool, and the answer, name its
path in the forms that a tool for files, a shell and Python would follow; others name a file to be written.
The secret in an observation, or the new file, shows that a model could read or write the host.

Sockets of Python raise the audit event `socket.connect` (PEP 578). Connections of child processes, and of
packages that connect in their own machine code, are not seen; those of whatever else runs in the process are.
"""

from __future__ import annotations

import ipaddress
import random
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from agentrl.envs.base import Env, Script
from agentrl.envs.check import arguments
from agentrl.envs.check.arena import Arena, Policy
from agentrl.envs.check.findings import Code, Finding, ProbeResult, error, some, warning
from agentrl.envs.check.policies import repeating
from agentrl.runtime.temporary import temporary_folder
from agentrl.types import Message, Task, ToolCall, say

_UP = "../" * 16
_LOCAL = ("localhost", "")
_LISTENING: list[list[str]] = []


async def probe_host(arena: Arena) -> ProbeResult:
    """Name a file of the host in every tool's arguments, and in answers."""
    secret = secrets.token_hex(16)
    with temporary_folder("host") as folder:
        hidden, wanted = folder / "hidden.txt", folder / "written.txt"
        hidden.write_text(secret, encoding="utf-8")
        texts = [*_reading(hidden), *_writing(wanted)]
        findings: list[Finding] = []
        for text, policy in _policies(texts):
            agent = await arena.watch(policy, arena.tasks[0])
            seen = any(secret in message.text for turn in agent.turns for message in turn.observation)
            if seen and not any(finding.code == "host-readable" for finding in findings):
                findings.append(_found("host-readable", "reads", text))
            if wanted.exists():
                findings.append(_found("host-writable", "writes", text))
                break
    return ProbeResult(tuple(findings))


def _found(code: Code, does: str, text: str) -> Finding:
    shown = text if len(text) < 80 else f"{text[:77]}..."
    return error(
        code,
        f"what the model writes {does} a file of the host, in the turns about {shown!r}; keep what it names "
        "below a folder of the episode, and run what it writes in a sandbox.",
    )


def _reading(path: Path) -> list[str]:
    inside = f"{_UP}{str(path).lstrip('/')}"
    return [str(path), inside, f"cat {path}", f"print(open({str(path)!r}).read())"]


def _writing(path: Path) -> list[str]:
    inside = f"{_UP}{str(path).lstrip('/')}"
    return [str(path), inside, f"touch {path}", f"open({str(path)!r}, 'w').close()"]


def _policies(texts: Sequence[str]) -> Iterator[tuple[str, Policy]]:
    """For each text an episode in which all tools get it, then one in which it is the answer."""
    for text in texts:
        yield text, _calling(text)
    for text in texts:
        yield text, repeating(f"```python\n{text}\n```")


def _calling(text: str) -> Policy:
    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del task
        tools = list(env.tool_schemas)
        # Few turns: which tools come first is drawn.
        rng.shuffle(tools)
        for tool in tools:
            call = ToolCall(tool.name, arguments.with_strings(tool, rng, text))
            yield Message("assistant", tool_calls=(call,))
        while True:
            yield say("")

    return policy


@contextmanager
def connections() -> Iterator[list[str]]:
    """The addresses of other hosts, `host:port`, that sockets connect to in the block."""
    _listen()
    found: list[str] = []
    _LISTENING.append(found)
    try:
        yield found
    finally:
        # By identity: two checks may have found the same.
        _LISTENING[:] = [other for other in _LISTENING if other is not found]


@cache
def _listen() -> None:
    # Once: a hook stays as long as the process. It returns at once where no check runs.
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if not _LISTENING or event != "socket.connect":
        return
    address = arguments[1]
    if isinstance(address, tuple) and len(address) > 1 and not _is_local(str(address[0])):
        for found in _LISTENING:
            found.append(f"{address[0]}:{address[1]}")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in _LOCAL


def connecting(found: Sequence[str], *, declares_server: bool) -> ProbeResult:
    """A warning where an environment that declares no server connects to another host."""
    figures = {"connections": float(len(found))}
    if not found or declares_server:
        return ProbeResult((), figures)
    text = (
        f"episodes connect to other hosts: {some(list(dict.fromkeys(found)))}; bring the data along, or say "
        'so with `needs = ("server",)`.'
    )
    return ProbeResult((warning("network-undeclared", text),), figures)
