"""Judges at a chat endpoint, which read their prompt as a person would: they know no code of the package."""

from __future__ import annotations

import json
import re

from tests.engine.chat.chat_server import assistant, refusal, reply

_IN_JSON = re.compile(r'"key": "(\w+)", "(\w+)": N}')
_IN_WORDS = re.compile(r"^(\w+) (\w+): N$", re.MULTILINE)
_BLOCK = re.compile(r"(----- \w+)\n(.*?)\n\1", re.DOTALL)


def prompt(request):
    """The text that a judge reads."""
    (message,) = request["messages"]
    return message["content"]


def blocks(text):
    """The texts that a prompt quotes, in their order, as a reader sees them: without invisible characters."""
    return [quoted.replace("\u2060", "") for _, quoted in _BLOCK.findall(text)]


def as_json(request, value, why="Because."):
    """The verdict in the object that the prompt asks for."""
    # What a text quotes comes before it.
    key, name = _IN_JSON.findall(prompt(request))[-1]
    return json.dumps({"explanation": why, "key": key, name: value})


def in_words(request, value, why="Because."):
    """The verdict in the line that the prompt asks for."""
    name, key = _IN_WORDS.findall(prompt(request))[-1]
    return f"{why}\n\n{name} {key}: {value}"


def with_schemas(value):
    """A judge at an endpoint that keeps to schemas. value: its verdict, or a function of the prompt."""

    def play(request):
        assert request["response_format"]["type"] == "json_schema"
        return assistant(as_json(request, value(prompt(request)) if callable(value) else value))

    return play


def ignoring_schemas(value):
    """A judge at an endpoint that ignores `response_format`, and writes prose."""

    def play(request):
        if "response_format" in request:
            return assistant(f"It is good.\n\nScore: {value}")
        return assistant(in_words(request, value(prompt(request)) if callable(value) else value))

    return play


def refusing_schemas(value):
    """The bodies of an endpoint that refuses `response_format`."""

    def body(request):
        if "response_format" in request:
            return 400, refusal("This response_format type is unavailable now", "invalid_request_error")
        return reply(assistant(in_words(request, value(prompt(request)) if callable(value) else value)))

    return body
