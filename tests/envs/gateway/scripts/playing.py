"""Boxes with words in them, and how a client plays one task after another.

{"variables": {"OPENAI_BASE_URL": ...}, "question": "Open amber."}     a line that comes in
{"answer": "seven", "error": null}                                     the line that goes out for it
"""

import json
import logging
import os
import sys

CONTENTS = {
    **{
        "amber": "seven",
        "birch": "nine",
        "cedar": "three",
        "delta": "eight",
        "ember": "two",
        "flint": "five",
    },
    **{"grove": "amber", "harbor": "birch", "island": "cedar"},
    **{"jasper": "grove", "kelp": "harbor", "lagoon": "island"},
}
"""By box: a value, or another box."""
NAME, DESCRIPTION = "open_box", "Open a box."
SCHEMA = {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]}
SYSTEM = "Say what the last box holds."


def open_box(box):
    """What a box holds."""
    return CONTENTS.get(box, "nothing")


def result_of(arguments):
    """What a call returns whose arguments are JSON, or should be."""
    try:
        return open_box(json.loads(arguments)["box"])
    except (ValueError, TypeError, KeyError):
        return "nothing"


def answered(conversation, ask):
    """The answer of a conversation: a generator of requests that is sent their replies."""
    reply = None
    while True:
        try:
            request = conversation.send(reply)
        except StopIteration as end:
            return end.value
        reply = ask(request)


async def answered_without_threads(conversation, ask):
    """The same, where `ask` is async."""
    reply = None
    while True:
        try:
            request = conversation.send(reply)
        except StopIteration as end:
            return end.value
        reply = await ask(request)


class Failing:
    """A block that ends with the exception that it has raised. error: its sentence; None = it raised none."""

    error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, raised, trace):
        if not isinstance(raised, Exception):
            return False
        logging.error("a task has failed", exc_info=raised)
        self.error = f"{kind.__name__}: {raised}"
        return True


def serve(ways):
    """Play the tasks that come in; `ways` are functions from a question to its answer, by name."""
    replies = os.fdopen(os.dup(1), "w")
    # Frameworks print.
    os.dup2(2, 1)
    for line in sys.stdin:
        task, answer = json.loads(line), None
        os.environ.update(task["variables"])
        with Failing() as failing:
            answer = ways[task["way"]](task["question"])
        replies.write(json.dumps({"answer": answer, "error": failing.error}) + "\n")
        replies.flush()
