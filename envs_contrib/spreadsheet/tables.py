"""Tables with what is wrong or missing in them, and whether it was put right.

row 1      name, group, two numbers, amount    (columns A to E)
below      a row each; amount is a formula
G and H    a threshold, a rate, and summaries  (labels in G, numbers and formulas in H)
J          for whoever has something to calculate
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from agentrl.tools import JSON
from envs_contrib.seeded import Draft
from envs_contrib.spreadsheet.formulas import Value, shown, values

SCRATCH = "J"
_ROWS = {1: 4, 2: 8, 3: 14}
_TOWNS = (
    *("Lisbon", "Porto", "Turin", "Genoa", "Lyon", "Lille", "Bergen", "Oslo", "Malmo", "Gdansk", "Krakow"),
    *("Brno", "Graz", "Linz", "Basel", "Ghent", "Delft", "Leeds", "York", "Cork", "Galway", "Split", "Varna"),
)
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
    *("November", "December"),
)
_THINGS = (
    *(
        "lamp",
        "desk",
        "chair",
        "shelf",
        "clock",
        "mirror",
        "rug",
        "vase",
        "stool",
        "bench",
        "frame",
        "basket",
    ),
    *("tray", "kettle", "candle", "cushion", "curtain", "ladder"),
)
_PEOPLE = (
    *(
        "Ada",
        "Ben",
        "Cleo",
        "Dora",
        "Emil",
        "Finn",
        "Gus",
        "Hana",
        "Ines",
        "Jan",
        "Kira",
        "Leo",
        "Mira",
        "Nils",
    ),
    *("Olga", "Paul", "Rosa", "Sven"),
)


class _Domain(NamedTuple):
    """What a table is about. columns: the headers of A to E."""

    rows: str
    names: tuple[str, ...]
    groups: tuple[str, ...]
    columns: tuple[str, str, str, str, str]


_DOMAINS = (
    _Domain("orders", _THINGS, ("north", "south", "west"), ("item", "region", "price", "quantity", "amount")),
    _Domain("shifts", _PEOPLE, ("bar", "kitchen", "door"), ("person", "team", "wage", "hours", "pay")),
    _Domain("repairs", _THINGS, ("home", "school", "shop"), ("item", "client", "fee", "days", "cost")),
)
_SUMMARIES = {
    "H4": ("total", "SUM"),
    "H5": ("average", "AVERAGE"),
    "H6": ("largest", "MAX"),
    "H7": ("smallest", "MIN"),
}


class _Table(NamedTuple):
    """A whole table. last: its last row."""

    domain: _Domain
    cells: dict[str, str]
    last: int
    rule: str
    title: str


def draw(rng: random.Random, level: int) -> Draft:
    """A task of one of three kinds."""
    table = _table(rng, level)
    kind = rng.choice(("mend", "fill", "ask"))
    return {"mend": _mend, "fill": _fill, "ask": _ask}[kind](rng, level, table)


def worth(start: Mapping[str, str], end: Mapping[str, str], targets: Mapping[str, str], seed: str) -> bool:
    """Whether the targets have the right values, whatever the inputs, and nothing else was changed.

    targets: right formulas by cell. A number, or a formula that happens to give it, is found out by other
    inputs, drawn from seed, in each of which one row decides.
    """
    for cell in {*start, *end} - {*targets}:
        if not cell.startswith(SCRATCH) and start.get(cell, "") != end.get(cell, ""):
            return False
    right = {**start, **targets}
    every = ({}, *_other_inputs(random.Random(seed), start)) if targets else ()
    return all(_agree(targets, values({**right, **inputs}), values({**end, **inputs})) for inputs in every)


def _agree(targets: Mapping[str, str], right: Mapping[str, Value], found: Mapping[str, Value]) -> bool:
    return all(_same(right[cell], found.get(cell)) for cell in targets)


def _same(right: Value, found: Value) -> bool:
    if isinstance(right, float) and isinstance(found, float):
        return math.isclose(right, found, rel_tol=1e-6, abs_tol=1e-6)
    return right == found


def _other_inputs(rng: random.Random, cells: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Other numbers and groups: for each row, inputs in which it is the largest, or the smallest by far."""
    rows = [cell[1:] for cell in cells if cell[0] == "C" and cell != "C1"]
    groups = sorted({cells[f"B{row}"] for row in rows})
    for decides, price in product(rows, ("90000", "0.01")):
        threshold = str(rng.randint(2, 30))
        new = {"H1": threshold, "H2": f"0.{rng.randint(1, 9)}"}
        for row in rows:
            new |= {f"B{row}": rng.choice(groups), f"C{row}": _price(rng), f"D{row}": str(rng.randint(1, 40))}
        # The largest one is at the threshold, where `>` and `>=` differ.
        yield new | {f"C{decides}": price, f"D{decides}": threshold if price > "1" else "1"}


def _price(rng: random.Random) -> str:
    return f"{rng.randint(4, 200) / 4:g}"


def _table(rng: random.Random, level: int) -> _Table:
    domain = rng.choice(_DOMAINS)
    last = 1 + _ROWS[level]
    *_, first, second, amount = domain.columns
    cells = dict(zip(("A1", "B1", "C1", "D1", "E1"), domain.columns, strict=True))
    formula = "=C{0}*D{0}" if level == 1 else "=IF(D{0}>=$H$1,C{0}*D{0}*(1-$H$2),C{0}*D{0})"
    groups = [*domain.groups, *rng.choices(domain.groups, k=last - 1 - len(domain.groups))]
    rng.shuffle(groups)
    for row, name in enumerate(rng.sample(domain.names, last - 1), start=2):
        numbers = (_price(rng), str(rng.randint(1, 40)))
        row_cells = (name, groups[row - 2], *numbers, formula.format(row))
        cells |= {f"{column}{row}": text for column, text in zip("ABCDE", row_cells, strict=True)}
    cells |= {"G1": f"reduced from {second}", "H1": str(rng.randint(10, 25))}
    cells |= {"G2": "reduced by", "H2": f"0.{rng.randint(1, 5)}"}
    for cell, (label, function) in _SUMMARIES.items():
        cells |= {f"G{cell[1]}": f"{label} {amount}", cell: f"={function}(E2:E{last})"}
    rule = f"{amount} is {first} times {second}"
    if level > 1:
        rule += f", times 1-H2 where {second} is at least H1"
    title = f"{domain.rows} of {rng.choice(_TOWNS)} in {rng.choice(_MONTHS)} {rng.randint(1990, 2029)}"
    return _Table(domain, cells, last, rule, title)


def _draft(kind: str, table: _Table, demand: str, facts: Mapping[str, JSON]) -> Draft:
    """facts: `start`, the sheet; `targets`, right formulas by cell; of a question, `result`."""
    targets = facts["targets"]
    formulas = [f"{cell} {text}" for cell, text in targets.items()] if isinstance(targets, dict) else []
    answer = str(facts.get("result") or "\n".join(formulas))
    return Draft(f"The sheet has the {table.title}. {demand}", answer, {**facts, "kind": kind})


def _mend(rng: random.Random, level: int, table: _Table) -> Draft:
    cell = rng.choice([*_SUMMARIES]) if level < 3 else f"E{rng.randint(2, table.last)}"
    wrong = rng.choice(_wrong_row(table, cell) if level == 3 else _wrong_summaries(table, cell))
    label = table.cells.get(f"G{cell[1]}", "")
    demand = (
        f"The formula in {cell} is wrong: it should be the {label} of all rows. Mend it.",
        "One of the formulas in H4 to H7 is wrong; the labels in G say what they should be. Mend it.",
        f"One cell of E2 to E{table.last} is not the formula that it should be: {table.rule}. Mend it.",
    )[level - 1]
    facts: dict[str, JSON] = {"start": {**table.cells, cell: wrong}, "targets": {cell: table.cells[cell]}}
    return _draft("mend", table, demand, facts)


def _wrong_summaries(table: _Table, cell: str) -> list[str]:
    """A row too few, another column, another function, a circle, a bracket too few."""
    function, last = _SUMMARIES[cell][1], table.last
    other = next(name for _, name in _SUMMARIES.values() if name != function)
    return [
        f"={function}(E2:E{last - 1})",
        f"={function}(E3:E{last})",
        f"={function}(D2:D{last})",
        f"={other}(E2:E{last})",
        f"={function}(E2:E{last},{cell})",
        f"={function}E2:E{last}",
    ]


def _wrong_row(table: _Table, cell: str) -> list[str]:
    """A number that is right as yet, another row, the wrong side of a condition, a circle."""
    row = int(cell[1:])
    other = row - 1 if row > 2 else row + 1
    right = table.cells[cell]
    return [
        shown(values(table.cells)[cell]),
        right.replace(f"D{row}", f"D{other}"),
        right.replace(">=", ">"),
        right.replace("1-", "1+"),
        f"{right}+H4-H4",
    ]


def _fill(rng: random.Random, level: int, table: _Table) -> Draft:
    amount = table.domain.columns[-1]
    cells, rows = dict(table.cells), range(2, table.last + 1)
    if level < 3:
        targets = {f"E{row}": cells.pop(f"E{row}") for row in rows}
        demand = f"Fill E2 to E{table.last}: {table.rule}."
    elif rng.random() < 0.5:
        targets = {f"F{row}": f"=E{row}/H4" for row in rows} | {"H4": cells.pop("H4")}
        cells["F1"] = "share"
        demand = f"Fill H4 with the total {amount}, F2 to F{table.last} with the part of it that each row is."
    else:
        targets = {f"F{row}": f"=F{row - 1}+E{row}" if row > 2 else "=E2" for row in rows}
        cells["F1"] = "so far"
        demand = f"Fill F2 to F{table.last} with the sum of {amount} from the first row down to that row."
    demand += " Write formulas, which stay right when the numbers of the table change."
    return _draft("fill", table, demand, {"start": {**cells}, "targets": {**targets}})


def _ask(rng: random.Random, level: int, table: _Table) -> Draft:
    name, group, *_, amount = table.domain.columns
    rows = range(2, table.last + 1)
    some, other = rng.sample(table.domain.groups, 2)
    row = rng.choice(rows)
    who = table.cells[f"A{row}"]
    demand = (
        f"What is the {amount} of the {name} {who}?",
        f"What is the total {amount} of the rows whose {group} is {some}?",
        f"What is the average {amount} of the rows whose {group} is {some}, less that of the rows whose "
        f"{group} is {other}?",
    )[level - 1]
    scratch = {f"J{row}": f'=IF(B{row}="{some}",E{row},"")' for row in rows}
    scratch |= {f"J{row + 20}": f'=IF(B{row}="{other}",E{row},"")' for row in rows if level == 3}
    scratch["J1"] = (
        f"=E{row}",
        f"=SUM(J2:J{table.last})",
        f"=AVERAGE(J2:J{table.last})-AVERAGE(J22:J{table.last + 20})",
    )[level - 1]
    result = values({**table.cells, **scratch})["J1"]
    demand += " Answer with the number alone, with two decimals. You may calculate in column J."
    facts: dict[str, JSON] = {"start": {**table.cells}, "targets": {}, "scratch": {**scratch}, "look_up": who}
    return _draft(
        "ask", table, demand, {**facts, "result": f"{result:.2f}" if isinstance(result, float) else ""}
    )
