"""Formulas of a spreadsheet: what they are parsed to, and the values of a whole sheet.

    =SUM(B2:B9)   =IF(C2>=$G$1, B2*C2*(1-G2), B2*C2)   =(B2+B3)/COUNT(B2:B9)

Numbers, texts in quotes, references and ranges, + - * /, comparisons (1 or 0), SUM, AVERAGE, MIN, MAX, COUNT,
and IF, of which only the branch that is taken is computed. Functions skip texts and empty cells; elsewhere an
empty cell counts as 0, as in spreadsheets. Errors are values: #DIV/0!, #VALUE!, #NUM!, #REF! (outside of the
sheet), #NAME? (none, or too long) and #CIRC! (it needs itself); what reads one, COUNT too, has it as well.
Nothing recurses from cell to cell: chains of any length, and circles, take linear time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

COLUMNS = "ABCDEFGHIJ"
ROWS = 40
MOST_CHARS = 200
"""The length of a cell (characters)."""
_MOST_DEPTH = 20
_MOST_NAMED = 500
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,9})?")
_CELL = re.compile(r"([A-Z])([0-9]{1,4})")
_RANGE_CHARS = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,15}(?:\.\d{1,9})?)|(?P<text>\"[^\"]*\")"
    r"|(?P<cell>\$?[A-Za-z]{1,3}\$?[0-9]{1,4})(?![A-Za-z0-9(])"
    r"|(?P<name>[A-Za-z]+)|(?P<sign><=|>=|<>|[-+*/()<>=,:]))"
)


class Fault(str):
    """The value of a cell whose formula failed: its error, such as `#DIV/0!`."""

    __slots__ = ()


class FormulaError(Exception):
    """A formula has no value."""


Value: TypeAlias = float | str | None
"""Of a cell: a number, a text (a `Fault` where it failed), or None where it is empty."""
Values: TypeAlias = Mapping[str, Value]
_Node: TypeAlias = Callable[[Values], Value]
_Argument: TypeAlias = Callable[[Values], Sequence[Value]]


class Formula(NamedTuple):
    """compute: its value from those of other cells. cells: those that it names, each once."""

    compute: _Node
    cells: tuple[str, ...]


def cells_of(range_: str) -> list[str]:
    """The cells of a range such as `B2:C4`, or of one cell, row by row.

    Raises:
        FormulaError: it is none, or lies outside of the sheet.
    """
    ends = [_CELL.fullmatch(end.strip().upper()) for end in range_.replace("$", "").split(":")]
    if not 1 <= len(ends) <= 2 or any(
        end is None or end[1] not in COLUMNS or len(end[1]) > 1 or not 1 <= int(end[2]) <= ROWS
        for end in ends
    ):
        raise FormulaError("#REF!")
    places = [(COLUMNS.index(end[1]), int(end[2])) for end in ends if end is not None]
    (left, right), (top, bottom) = (sorted((places[0][axis], places[-1][axis])) for axis in (0, 1))
    return [f"{COLUMNS[x]}{y}" for y in range(top, bottom + 1) for x in range(left, right + 1)]


def values(cells: Mapping[str, str]) -> dict[str, Value]:
    """The value of every cell, in linear time: each is computed once those that it needs are."""
    found: dict[str, Value] = {}
    waiting: dict[str, set[str]] = {}
    needed_by: dict[str, list[str]] = {}
    for cell, text in cells.items():
        if not text.startswith("="):
            found[cell] = float(text) if _NUMBER.fullmatch(text) else text or None
            continue
        formula = parsed(text)
        waiting[cell] = {other for other in formula.cells if cells.get(other, "").startswith("=")}
        for other in waiting[cell]:
            needed_by.setdefault(other, []).append(cell)
    ready = [cell for cell, needs in waiting.items() if not needs]
    while ready:
        cell = ready.pop()
        found[cell] = _computed(parsed(cells[cell]), found)
        for other in needed_by.get(cell, ()):
            waiting[other].discard(cell)
            if not waiting[other]:
                ready.append(other)
    return {cell: found.get(cell, Fault("#CIRC!")) for cell in cells}


def _computed(formula: Formula, found: Values) -> Value:
    try:
        return formula.compute(found)
    except FormulaError as error:
        return Fault(error.args[0])


def shown(value: Value) -> str:
    """A value as a reader of the sheet sees it: numbers with four decimals at most."""
    return f"{round(value, 4):.12g}" if isinstance(value, float) else value or ""


@lru_cache(maxsize=4096)
def parsed(text: str) -> Formula:
    """The formula of a cell; one that is none computes to an error."""
    try:
        parser = _Parser(text)
        return Formula(parser.whole(), tuple(dict.fromkeys(parser.cells)))
    except FormulaError as error:
        return Formula(_failing(error.args[0]), ())


def _failing(code: str) -> _Node:
    def fail(found: Values) -> Value:
        del found
        raise FormulaError(code)

    return fail


class _Parser:
    """Recursive descent, to a bounded depth; every method returns what computes its part."""

    def __init__(self, text: str) -> None:
        self.cells: list[str] = []
        self._depth = 0
        self._tokens = [*_tokens(text)]

    def whole(self) -> _Node:
        node = self._comparison()
        if self._tokens:
            raise FormulaError("#NAME?")
        return node

    def _comparison(self) -> _Node:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise FormulaError("#NAME?")
        left = self._sum()
        if sign := self._next("<=", ">=", "<>", "<", ">", "="):
            left = _compared(left, sign, self._sum())
        self._depth -= 1
        return left

    def _sum(self) -> _Node:
        left = self._product()
        while sign := self._next("+", "-"):
            left = _calculated(left, sign, self._product())
        return left

    def _product(self) -> _Node:
        left = self._factor()
        while sign := self._next("*", "/"):
            left = _calculated(left, sign, self._factor())
        return left

    def _factor(self) -> _Node:
        is_negative = False
        while sign := self._next("-", "+"):
            is_negative ^= sign == "-"
        node = self._atom()
        return _calculated(lambda _: 0.0, "-", node) if is_negative else node

    def _atom(self) -> _Node:
        if self._next("("):
            node = self._comparison()
            self._expect(")")
            return node
        kind, text = self._tokens.pop(0) if self._tokens else ("", "")
        if kind == "number":
            number = float(text)
            return lambda _: number
        if kind == "text":
            return lambda _: text[1:-1]
        if kind == "cell":
            return _reference(*self._named(text))
        if kind == "name":
            return self._function(text.upper())
        raise FormulaError("#NAME?")

    def _function(self, name: str) -> _Node:
        self._expect("(")
        arguments = [self._argument()]
        while self._next(","):
            arguments.append(self._argument())
        self._expect(")")
        if name == "IF" and len(arguments) == 3:
            return _chosen(*arguments)
        if name not in _FUNCTIONS:
            raise FormulaError("#NAME?")
        return _folded(name, arguments)

    def _argument(self) -> _Argument:
        """A range, or an expression, whose value is the only one."""
        kinds = [kind if kind == "cell" else text for kind, text in self._tokens[:3]]
        if kinds == ["cell", ":", "cell"]:
            (_, first), _, (_, last) = self._tokens[:3]
            del self._tokens[:3]
            return _ranged(self._named(f"{first}:{last}"))
        node = self._comparison()
        return lambda found: (node(found),)

    def _named(self, range_: str) -> list[str]:
        cells = cells_of(range_)
        self.cells += cells
        if len(self.cells) > _MOST_NAMED:
            raise FormulaError("#NAME?")
        return cells

    def _next(self, *signs: str) -> str:
        """The next token, where it is one of these signs; "" otherwise."""
        if self._tokens and self._tokens[0] in [("sign", sign) for sign in signs]:
            return self._tokens.pop(0)[1]
        return ""

    def _expect(self, sign: str) -> None:
        if not self._next(sign):
            raise FormulaError("#NAME?")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 1, len(text.rstrip())
    if end > MOST_CHARS:
        raise FormulaError("#NAME?")
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise FormulaError("#NAME?")
        yield match.lastgroup, match[match.lastgroup]
        place = match.end()


def _reference(cell: str) -> _Node:
    return lambda found: _sound(found.get(cell))


def _ranged(cells: Sequence[str]) -> _Argument:
    return lambda found: [_sound(found.get(cell)) for cell in cells]


def _sound(value: Value) -> Value:
    if isinstance(value, Fault):
        raise FormulaError(str(value))
    return value


def _number(value: Value) -> float:
    if isinstance(value, str):
        raise FormulaError("#VALUE!")
    return value or 0.0


def _calculated(left: _Node, sign: str, right: _Node) -> _Node:
    def calculate(found: Values) -> Value:
        a, b = _number(left(found)), _number(right(found))
        if sign == "/" and b == 0:
            raise FormulaError("#DIV/0!")
        return _finite(a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b)

    return calculate


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise FormulaError("#NUM!")
    return number


def _compared(left: _Node, sign: str, right: _Node) -> _Node:
    def compare(found: Values) -> Value:
        a, b = left(found), right(found)
        if isinstance(a, str) or isinstance(b, str):
            # An empty cell is an empty text here.
            texts = [str(value or "").lower() for value in (a, b)]
            if isinstance(a, float) or isinstance(b, float):
                if sign not in ("=", "<>"):
                    raise FormulaError("#VALUE!")
                return float(sign == "<>")
            return _holds((texts[0] > texts[1]) - (texts[0] < texts[1]), sign)
        return _holds(((a or 0.0) > (b or 0.0)) - ((a or 0.0) < (b or 0.0)), sign)

    return compare


def _holds(order: int, sign: str) -> float:
    """Whether an order (-1, 0, 1) is the one of a sign."""
    return float(
        order in {"=": (0,), "<>": (-1, 1), "<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}[sign]
    )


def _chosen(condition: _Argument, then: _Argument, otherwise: _Argument) -> _Node:
    return lambda found: _only((then if _number(_only(condition(found))) else otherwise)(found))


def _only(given: Sequence[Value]) -> Value:
    if len(given) != 1:
        raise FormulaError("#VALUE!")
    return given[0]


def _folded(name: str, arguments: Sequence[_Argument]) -> _Node:
    def fold(found: Values) -> Value:
        numbers = [value for given in arguments for value in given(found) if isinstance(value, float)]
        return _finite(_FUNCTIONS[name](numbers))

    return fold


def _average(numbers: Sequence[float]) -> float:
    if not numbers:
        raise FormulaError("#DIV/0!")
    return sum(numbers) / len(numbers)


_FUNCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "SUM": lambda numbers: sum(numbers, 0.0),
    "AVERAGE": _average,
    "MIN": lambda numbers: min(numbers, default=0.0),
    "MAX": lambda numbers: max(numbers, default=0.0),
    "COUNT": lambda numbers: float(len(numbers)),
}
