"""Spreadsheet: formulas against exact fractions, and what is written against other inputs."""

from __future__ import annotations

import asyncio
import operator
import random
import re
from fractions import Fraction
from itertools import pairwise

import pytest

from agentrl import ScriptedAgent, call, play, say
from agentrl.envs.check import check_env
from envs_contrib.spreadsheet import Spreadsheet
from envs_contrib.spreadsheet.formulas import COLUMNS, ROWS, FormulaError, cells_of, shown, values
from envs_contrib.spreadsheet.tables import worth

DONE = say("done")
INPUTS = {f"{column}{row}": str(place * 7 + row * 3 - 9) for place, column in enumerate("AB")
          for row in (1, 2, 3)}  # fmt: skip


def computed(formula, **cells):
    return values({**cells, "J9": formula})["J9"]


class WrongError(Exception):
    """A formula of the brute force has no value."""


def divided(a, b):
    if b == 0:
        raise WrongError
    return a / b


SIGNS = {"<": operator.lt, "<=": operator.le, "=": operator.eq, "<>": operator.ne, ">": operator.gt}
CALCULATED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": divided}
FOLDED = {
    "SUM": sum,
    "MIN": min,
    "MAX": max,
    "COUNT": lambda numbers: Fraction(len(numbers)),
    "AVERAGE": lambda numbers: sum(numbers) / len(numbers),
}


def leaf(rng):
    if rng.random() < 0.5:
        number = rng.randint(0, 9)
        return str(number), lambda cells: Fraction(number)
    cell = rng.choice([*INPUTS])
    return cell, lambda cells: Fraction(cells[cell])


def condition(rng, left, right, third):
    (one, a), (two, b), (three, c) = left, right, third
    sign = rng.choice([*SIGNS])
    text = f"if({one}{sign}{two},{three},{one})"
    return text, lambda cells: c(cells) if SIGNS[sign](a(cells), b(cells)) else a(cells)


def expression(rng, depth):
    """A random formula as text, and the function that computes it in fractions from the inputs."""
    if depth == 0 or rng.random() < 0.2:
        return leaf(rng)
    kind = rng.choice((*CALCULATED, *FOLDED, "minus", "IF"))
    (left, a), (right, b) = expression(rng, depth - 1), expression(rng, depth - 1)
    if kind in CALCULATED:
        return f"({left}{kind} {right})", lambda cells: CALCULATED[kind](a(cells), b(cells))
    if kind == "minus":
        return f"-({left})", lambda cells: -a(cells)
    if kind == "IF":
        return condition(rng, (left, a), (right, b), expression(rng, depth - 1))
    range_, span = rng.choice([("A1:A3", "A1 A2 A3"), ("A1:B2", "A1 B1 A2 B2"), ("$B$3:A2", "A2 B2 A3 B3")])
    numbers = [leaf_of(name) for name in span.split()]
    return f"{kind}({range_},{left})", lambda cells: FOLDED[kind]([*(n(cells) for n in numbers), a(cells)])


def leaf_of(name):
    return lambda cells: Fraction(cells[name])


def test_formulas_are_those_of_exact_fractions():
    rng = random.Random(0)
    faults = 0
    for _ in range(800):
        text, compute = expression(rng, 3)
        found = computed(f"={text}", **INPUTS)
        if len(text) >= 200:
            continue
        try:
            exact = compute(INPUTS)
        except WrongError:
            faults += 1
            assert found == "#DIV/0!", text
            continue
        assert isinstance(found, float), (text, found)
        assert found == pytest.approx(float(exact), rel=1e-9, abs=1e-9), text
    assert faults > 10


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("=1/0", "#DIV/0!"),
        ("=A1/B9", "#DIV/0!"),
        ("=AVERAGE(C1:C9)", "#DIV/0!"),
        ('="a"+1', "#VALUE!"),
        ("=T1", "#REF!"),
        ("=A41", "#REF!"),
        ("=A0", "#REF!"),
        ("=SUM(A1:AA2)", "#REF!"),
        ("=", "#NAME?"),
        ("=SUM(A1:A3", "#NAME?"),
        ("=SUM A1", "#NAME?"),
        ("=FOO(1)", "#NAME?"),
        ("=A1:A3", "#NAME?"),
        ("=IF(1,2)", "#NAME?"),
        ("=__import__('os')", "#NAME?"),
        ("=2**3", "#NAME?"),
        ("=" + "(" * 60 + "1" + ")" * 60, "#NAME?"),
        ("=" + "-" * 190 + "1", 1.0),
        ("=" + "1+" * 150 + "1", "#NAME?"),
        ("=J9", "#CIRC!"),
        ("=J9+1", "#CIRC!"),
        ('=IF(A1="", 1, 2)', 2.0),
        ('=IF(C7="", 1, 2)', 1.0),
        ('=IF("Ab"="aB",1,2)', 1.0),
        ('=IF(A1="x",1,2)', 2.0),
        ('=IF(A1<"x",1,2)', "#VALUE!"),
        ("=IF(B9=0,0,A1/B9)", 0.0),
        ('="text"', "text"),
        ("=SUM(A1:A3,C1)", -9.0),
    ],
)
def test_what_is_no_number_is_an_error_text(formula, expected):
    assert computed(formula, **INPUTS) == expected


def test_circles_and_what_hangs_on_them_are_errors_and_long_chains_are_not():
    sheet = {"A1": "=A2", "A2": "=A3+1", "A3": "=A1", "B1": "=A1+1", "B2": "=B3", "B3": "4"}
    assert values(sheet) == {**dict.fromkeys(("A1", "A2", "A3", "B1"), "#CIRC!"), "B2": 4.0, "B3": 4.0}
    every = [f"{column}{row}" for column in COLUMNS for row in range(1, ROWS + 1)]
    chain = {cell: f"={before}+{before}" for before, cell in pairwise(every)}
    found = values({every[0]: "1", **chain})
    assert found[every[300]] == 2.0**300
    squares = {cell: f"={before}*{before}" for before, cell in pairwise(every)}
    assert values({every[0]: "10", **squares})[every[-1]] == "#NUM!"


def test_ranges_are_read_row_by_row_and_others_refused():
    assert cells_of("b2:A1") == ["A1", "B1", "A2", "B2"]
    assert cells_of("$C$3") == ["C3"]
    for text in ("", "A", "1", "A1:B2:C3", "K1", "A41", "A0", "A1:", "Ａ1", "A" * 1000, "A1\x00"):
        with pytest.raises(FormulaError):
            cells_of(text)
    assert [shown(value) for value in (None, 2.0, 1 / 3, "x")] == ["", "2", "0.3333", "x"]


def played(task, *actions):
    episode = asyncio.run(play(Spreadsheet(), ScriptedAgent(iter(actions)), task, seed=0))
    return episode.step_rewards[-1]


def of_kind(kind, level):
    return [task for task in Spreadsheet(level=level).tasks("test") if task.metadata["kind"] == kind]


def test_formulas_in_another_form_are_right_and_numbers_are_not():
    for level in (1, 2, 3):
        for task in (task for kind in ("mend", "fill") for task in of_kind(kind, level)[:3]):
            targets, start = task.metadata["targets"], task.metadata["start"]
            numbers = values({**start, **targets})
            written = {cell: f"{numbers[cell]!r}" for cell in targets}
            assert played(task, call("write_cells", cells=written), DONE) == 0.0
            constants = {cell: f"={number}+0" for cell, number in written.items()}
            assert played(task, call("write_cells", cells=constants), DONE) == 0.0
            others = {cell: f"= ({text[1:].lower()}) *1" for cell, text in targets.items()}
            assert played(task, call("write_cells", cells=others), DONE) == 1.0
            # One more cell is changed; the free column may be.
            assert played(task, call("write_cells", cells={**targets, "A2": "x"}), DONE) == 0.0
            assert played(task, call("write_cells", cells={**targets, "I9": "x"}), DONE) == 0.0
            assert played(task, call("write_cells", cells={**targets, "J9": "x"}), DONE) == 1.0
            assert played(task, DONE) == 0.0


@pytest.mark.parametrize("cell", ["H4", "H5", "H6", "H7"])
def test_a_summary_that_leaves_out_any_row_is_found_out(cell):
    task = next(task for task in of_kind("fill", 2))
    start = {**task.metadata["start"], **task.metadata["targets"]}
    right = start[cell]
    last = max(int(name[1:]) for name in start if name[0] == "A")
    for row in range(2, last + 1):
        parts = [f"E{other}" for other in range(2, last + 1) if other != row]
        short = f"{right.split('(')[0]}({','.join(parts)})"
        assert not worth(start, {**start, cell: short}, {cell: right}, "seed")
    assert worth(start, {**start, cell: right.replace(":", " : ")}, {cell: right}, "seed")


def test_questions_have_the_answer_of_brute_force():
    for level in (2, 3):
        for task in of_kind("ask", level):
            start = task.metadata["start"]
            rows = [name[1:] for name in start if name[0] == "C" and name != "C1"]
            amounts = {}
            for row in rows:
                price, count = Fraction(start[f"C{row}"]), int(start[f"D{row}"])
                rate = Fraction(start["H2"]) if count >= int(start["H1"]) else 0
                amounts.setdefault(start[f"B{row}"], []).append(price * count * (1 - rate))
            asked = [
                word for word in re.findall(r"\w+", task.prompt[0].text.split(". ", 1)[1]) if word in amounts
            ]
            expected = sum(amounts[asked[0]])
            if level == 3:
                means = [sum(amounts[name]) / len(amounts[name]) for name in asked]
                expected = means[0] - means[1]
            assert float(task.answer) == pytest.approx(float(expected), abs=0.006), task.prompt[0].text
            assert played(task, say(task.answer)) == 1.0
            assert played(task, say(f"about {task.answer}")) == 0.0
            assert played(task, call("write_cells", cells={"A2": "x"}), say(task.answer)) == 0.0


def test_it_is_worth_training_on():
    assert check_env(Spreadsheet, n=4).findings == ()
