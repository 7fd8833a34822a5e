"""A conversation as it is played: the systems that the calls change, and what the benchmark says of them."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module

from agentrl import ToolRejected
from agentrl.tools import JSON
from envs_contrib.bfcl.data import Call, Entry, System, functions, system_class

_ONE_AT_A_TIME = threading.Lock()
"""Some functions set the precision of a library for the whole process."""
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the functions raise where their arguments do not fit."""
_DIGITS = frozenset({"decimal_places", "exponent", "precision"})
_MOST_DIGITS, _MOST = 1000, 1e18


class Systems:
    """The instances of a conversation's classes; calls change them."""

    def __init__(self, entry: Entry) -> None:
        self.instances: dict[str, System] = {}
        self._owners: dict[str, str] = {}
        is_long = "long_context" in entry.id
        for name in entry.classes:
            instance = self.instances[name] = system_class(name)()
            # The one without a state has no scenario.
            if hasattr(instance, "_load_scenario"):
                instance._load_scenario(copy.deepcopy(dict(entry.scenario.get(name, {}))), is_long)
            self._owners |= dict.fromkeys((function.name for function in functions(name)), name)

    def call(self, call: Call) -> str:
        """The text of a result, as the benchmark writes it; also of an exception.

        Raises:
            ToolRejected: its numbers would take minutes and gigabytes.
        """
        owner = self._owners[call.name]
        if owner == "MathAPI":
            _check_numbers(call.arguments)
        function = getattr(self.instances[owner], call.name)
        try:
            with _ONE_AT_A_TIME:
                result = function(**copy.deepcopy(dict(call.arguments)))
        except _ERRORS as error:
            return f"Error during execution: {error}"
        if not isinstance(result, dict):
            return str(result)
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)


class Conversation:
    """An entry that is played beside its right calls.

    turn: the one under way, from 0. is_right: whether all turns that have ended are.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry, self.turn, self.is_right = entry, 0, True
        self._played, self._right = Systems(entry), Systems(entry)
        self._results: list[str] = []
        self._num_calls = 0

    def call(self, name: str, /, **arguments: JSON) -> str:
        """The result of a call of the model's."""
        result = self._played.call(Call(name, arguments))
        self._num_calls += 1
        self._results.append(result)
        return result

    def end_turn(self) -> None:
        """Make the right calls of the turn, and compare as the benchmark does."""
        calls = self.entry.right[self.turn]
        results = [self._right.call(call) for call in calls]
        if calls:
            checks = import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
            same = checks.state_checker(self._played.instances, self._right.instances)
            seen = checks.response_checker(self._results, results, self.turn)
            self.is_right = self.is_right and self._num_calls > 0 and same["valid"] and seen["valid"]
        self._num_calls = 0
        self.turn += 1

    @property
    def has_ended(self) -> bool:
        """Whether the last turn has ended."""
        return self.turn == len(self.entry.turns)


def _check_numbers(arguments: Mapping[str, JSON]) -> None:
    for name, value in arguments.items():
        most = _MOST_DIGITS if name in _DIGITS else _MOST
        values: Sequence[JSON] = value if isinstance(value, list) else [value]
        if any(isinstance(number, int | float) and abs(number) > most for number in values):
            raise ToolRejected(f"{name} is at most {most:,.0f} here.")
