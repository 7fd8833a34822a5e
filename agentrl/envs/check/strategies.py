"""Cheap strategies that an attack tries: none solves a task, and a reward that pays one can be hacked.

    always 'yes'                        constant answers: usual ones, and the most frequent of training
    word of the verifier: 'done'        the strings in the verifier's code, each alone
    last number of the prompt           pieces of the prompt
    last line of what `look` says       pieces of the result of a call, whose arguments are drawn at random
    `look` again and again              one call, repeated: any, one for all tasks, or a piece of the prompt
    `look` turn after turn, an answer   calls with any arguments up to the last turn, or many in the first one
    1 word, 512 words, 100,000 letters  length alone

Whatever pays is a fault of the reward, or a task that needs no thought.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from agentrl.envs.base import Env, Script
from agentrl.envs.check import arguments
from agentrl.envs.check.arena import Policy
from agentrl.envs.check.policies import NO_ANSWER, PIECES, VERDICT, pieces_of, repeating
from agentrl.envs.check.wording import verifier_words
from agentrl.types import Message, Task, ToolCall, call, say
from agentrl.types.seams import ToolSchema

CONSTANTS = (
    *("", "yes", "no", "true", "false", "None", "A", "B", "C", "D", "0", "1", "2", "-1", "[]", "{}"),
    *(NO_ANSWER, VERDICT, "done"),
)
_MOST_FREQUENT = 8
_ENDS = {"first": 0, "last": -1}
_TEXT_LENGTHS = {"1 word": "so", "512 words": "so " * 512, "100,000 letters": "x" * 100_000}
_SHOWN = 40
_DRAWS = 32
_AT_ONCE = 16
"""Calls of one turn; a world takes this many of one by default (count)."""
_MOST_CALLS = 64
_ANSWER = "done"

Piece = Callable[[str], str]
"""From a text to a piece of it; "" where it has none."""


class Strategy(NamedTuple):
    """A policy of an attack, and its name."""

    name: str
    policy: Policy


def strategies(env: Env, training: Sequence[Task]) -> Iterator[Strategy]:
    """All strategies for an environment. training: tasks whose answers are known."""
    answers = Counter(task.answer for task in training if task.answer)
    for text in CONSTANTS:
        yield Strategy(f"always {text[:_SHOWN]!r}", repeating(text))
    for text, count in answers.most_common(_MOST_FREQUENT):
        yield Strategy(f"always {text[:_SHOWN]!r}, the answer of {count} training tasks", repeating(text))
    for text in verifier_words(env):
        yield Strategy(f"word of the verifier: {text[:_SHOWN]!r}", repeating(text))
    for name, text in _TEXT_LENGTHS.items():
        yield Strategy(name, repeating(text))
    yield Strategy("the whole prompt", _says(lambda text: text))
    for name, piece in _pieces():
        yield Strategy(f"{name} of the prompt", _says(piece))
    for tool in env.tool_schemas:
        yield Strategy(f"`{tool.name}` again and again", _calls(tool.name, None))
        yield Strategy(f"`{tool.name}` turn after turn, then an answer", _calls_then_answers(tool.name))
        yield Strategy(f"`{tool.name}` {_AT_ONCE} times at once, then an answer", _at_once(tool.name))
        for given in _drawn(tool):
            shown = json.dumps(given, ensure_ascii=False)[:_SHOWN]
            yield Strategy(f"`{tool.name}` with {shown}", _same_call(tool.name, given))
        for name, piece in _pieces():
            yield Strategy(f"`{tool.name}` with the {name} of the prompt", _calls(tool.name, piece))
            yield Strategy(f"{name} of what `{tool.name}` says", _repeats_result(tool.name, piece))


def _pieces() -> Iterator[tuple[str, Piece]]:
    for kind in PIECES:
        for end, index in _ENDS.items():
            yield f"{end} {kind}", _piece(kind, index)


def _piece(kind: str, index: int) -> Piece:
    def piece(text: str) -> str:
        found = pieces_of(kind, text)
        return found[index] if found else ""

    return piece


def _prompt(task: Task) -> str:
    return "\n".join(message.text for message in task.prompt)


def _says(piece: Piece) -> Policy:
    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del env, rng
        while True:
            yield say(piece(_prompt(task)))

    return policy


def _call(env: Env, name: str, text: str | None, rng: random.Random) -> Message:
    """A call of a tool with fitting arguments, or with `text` in all that take text."""
    tool = next((tool for tool in env.tool_schemas if tool.name == name), None)
    if tool is None:
        return Message("assistant", tool_calls=(ToolCall(name, {}),))
    if text is None:
        return call(name, **(arguments.fitting(tool, rng) or {}))
    return Message("assistant", tool_calls=(ToolCall(name, arguments.with_strings(tool, rng, text)),))


def _calls(name: str, piece: Piece | None) -> Policy:
    """The same call in every turn."""

    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        action = _call(env, name, None if piece is None else piece(_prompt(task)), rng)
        while True:
            yield action

    return policy


def _calls_then_answers(name: str) -> Policy:
    """A call with any arguments in every turn but the last, which answers."""

    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del task
        for _ in range(min(env.limits.max_turns - 1, _MOST_CALLS)):
            yield _call(env, name, None, rng)
        while True:
            yield say(_ANSWER)

    return policy


def _at_once(name: str) -> Policy:
    """Calls with any arguments in the first turn, then an answer."""

    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del task
        calls = [call for _ in range(_AT_ONCE) for call in _call(env, name, None, rng).tool_calls]
        yield Message("assistant", tool_calls=tuple(calls))
        while True:
            yield say(_ANSWER)

    return policy


def _drawn(tool: ToolSchema) -> list[arguments.Arguments]:
    """A few arguments that fit, each once: with few choices, all of them."""
    drawn = (arguments.fitting(tool, random.Random(number)) for number in range(_DRAWS))
    every = {json.dumps(given, sort_keys=True): given for given in drawn if given}
    return list(every.values())[:_MOST_FREQUENT]


def _same_call(name: str, given: arguments.Arguments) -> Policy:
    """The same call in every turn of every task."""

    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del env, task, rng
        while True:
            yield call(name, **given)

    return policy


def _repeats_result(name: str, piece: Piece) -> Policy:
    """One call with any arguments, then a piece of what it returned.

    A call about the task, whose result is the answer, would be a solution of it.
    """

    def policy(env: Env, task: Task, rng: random.Random) -> Script:
        del task
        result = yield _call(env, name, None, rng)
        while True:
            yield say(piece(result))

    return policy
