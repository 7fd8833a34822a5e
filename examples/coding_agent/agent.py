"""A coding agent for the command line: it reads, writes, edits and runs until the model is done.

    OPENAI_BASE_URL=http://127.0.0.1:30000/v1 OPENAI_API_KEY=x python3 agent.py task.md

It works in the folder in which it is started. It needs Python's standard library alone, and any endpoint that
speaks OpenAI's chat protocol: agentrl's gateway, for an episode, or a server. Nothing in it knows agentrl.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

MOST_TURNS = 24
MOST_CHARS = 6000
COMMAND_S = 20.0
REQUEST_S = 600.0
SYSTEM = (
    "You repair programs. Look around with `run` and `read`, change files with `edit` or `write`, and run "
    "the tests after each change. When they pass, answer in a few words, without a call."
)


class RefusedError(Exception):
    """A call that cannot be made; the model reads why."""


class Function(TypedDict):
    """The function of a call: its name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call as the protocol has it."""

    id: str
    type: str
    function: Function


class Message(TypedDict, total=False):
    """A message as the protocol has it."""

    role: str
    content: str | None
    tool_calls: list[ToolCall]
    tool_call_id: str


def read(path: str, first: int = 1, last: int = 0) -> str:
    """Lines of a file with their numbers. first, last: of them; 0 = to the end."""
    lines = _text(path).splitlines()
    chosen = lines[max(first, 1) - 1 : last or len(lines)]
    return (
        "\n".join(f"{number:4} {line}" for number, line in enumerate(chosen, start=max(first, 1)))
        or "(empty)"
    )


def write(path: str, text: str) -> str:
    """A file of this text, in the place of one that is there."""
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be written: {error}") from None
    return f"{path} has {len(text.splitlines())} lines."


def edit(path: str, old: str, new: str) -> str:
    """One place of a file, `old`, becomes `new`."""
    text = _text(path)
    count = text.count(old) if old else 0
    if count != 1:
        raise RefusedError(f"`old` occurs {count} times in {path}; write a piece of it that occurs once.")
    write(path, text.replace(old, new))
    line = text[: text.index(old)].count("\n") + 1
    return f"{path} is changed in line {line}."


def run(command: str) -> str:
    """What a command prints, both streams, and its exit code where that is not 0."""
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RefusedError(f"It was stopped after {COMMAND_S:g} s.") from None
    except (OSError, ValueError) as error:
        raise RefusedError(f"It does not start: {error}") from None
    text = done.stdout.decode("utf-8", "replace")
    return text + (f"[exit code {done.returncode}]" if done.returncode else "") or "(no output)"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}") from None


def _schema(
    name: str, what: str, needed: dict[str, str], others: dict[str, str] | None = None
) -> dict[str, object]:
    """The description of a tool for the model. needed, others: the types of its arguments."""
    properties = {argument: {"type": kind} for argument, kind in {**needed, **(others or {})}.items()}
    parameters = {"type": "object", "properties": properties, "required": list(needed)}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


FUNCTIONS: dict[str, Callable[..., str]] = {"read": read, "write": write, "edit": edit, "run": run}
SCHEMAS = [
    _schema(
        "read",
        "Read a file, or some of its lines.",
        {"path": "string"},
        {"first": "integer", "last": "integer"},
    ),
    _schema("write", "Write a file as a whole.", {"path": "string", "text": "string"}),
    _schema("edit", "Replace a text that occurs once.", {"path": "string", "old": "string", "new": "string"}),
    _schema("run", "Run a command of a shell.", {"command": "string"}),
]


def result_of(call: ToolCall) -> str:
    """What the model reads of a call: its result, or what was wrong with it."""
    name = call["function"]["name"]
    function = FUNCTIONS.get(name)
    if function is None:
        return f"There is no tool `{name}`; there are {', '.join(FUNCTIONS)}."
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        return shortened(function(**arguments))
    except RefusedError as refused:
        return str(refused)
    except (ValueError, TypeError) as error:
        return f"The arguments do not fit `{name}`: {error}"


def shortened(text: str) -> str:
    """A long text without its middle."""
    half = MOST_CHARS // 2
    lost = len(text) - 2 * half
    return text if lost <= 0 else f"{text[:half]}\n... {lost:,} characters are left out ...\n{text[-half:]}"


def reply_to(messages: list[Message]) -> Message:
    """The model's next message.

    Raises:
        OSError: there is no reply: the endpoint is gone, or refuses the request, as where no room is left.
    """
    body = {"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": messages, "tools": SCHEMAS}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL'].rstrip('/')}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as reply:
        message: Message = json.load(reply)["choices"][0]["message"]
    return message


def solve(task: str) -> str:
    """Work on a task to the end; the model's last words.

    Every request repeats all that was said, unchanged, so an episode is one conversation.
    """
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(MOST_TURNS):
        try:
            message = reply_to(messages)
        except urllib.error.HTTPError as error:
            return f"(no reply: {error.code} {error.read()[:300].decode('utf-8', 'replace')})"
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            return message.get("content") or ""
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result_of(call)} for call in calls
        ]
    return "(no turns are left)"


def main() -> None:
    """Solve the task of a file."""
    if len(sys.argv) != 2:
        sys.exit("usage: python3 agent.py TASK_FILE")
    print(solve(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
