"""Shops, and errands in them: a fact to find, something to buy, a form to fill in."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import cast

from agentrl.tools import JSON
from envs_contrib.seeded import Draft
from envs_contrib.website.site import Product, Site

_FACTS: Mapping[str, Mapping[str, tuple[int, int, float]]] = {
    "kettles": {"litres": (4, 30, 0.1), "watts": (8, 30, 100)},
    "lamps": {"lumens": (8, 60, 50), "centimetres": (20, 180, 1)},
    "backpacks": {"litres": (15, 70, 1), "grams": (20, 90, 25)},
    "tents": {"grams": (30, 120, 50), "centimetres": (90, 200, 1)},
}
"""By category: what products say of themselves, as a lowest and a highest number of steps, and the step."""
_SYLLABLES = (
    "al",
    "be",
    "co",
    "da",
    "el",
    "fi",
    "go",
    "ha",
    "in",
    "ju",
    "ka",
    "lo",
    "mi",
    "no",
    "or",
    "pa",
    "ri",
)
_NAMES = tuple("".join(parts).capitalize() for parts in product(_SYLLABLES, repeat=3))
_MONTHS = ("January", "March", "May", "July", "October")
_REASONS = ("broken", "too late", "too small", "not as described")
_PEOPLE = ("Ann Berg", "Ben Cole", "Cleo Dahl", "Dan Ek", "Eva Fox", "Finn Gray", "Hana Ito", "Ines Jung")
_TOWNS = ("Lisbon", "Turin", "Bergen", "Graz", "Ghent", "Cork", "Varna", "Lille")
_SIZES = {1: (2, 3), 2: (3, 5), 3: (4, 8)}
"""By level: the number of categories, and of products in each."""
_PAGE_SIZE = 5

Step = tuple[str, str, str]
"""What the expert does: open a path, click a label, or type into a label a text."""
Errand = tuple[str, str, list[Step]]
"""What is asked for, the right outcome, and what the expert does."""


def draw(rng: random.Random, level: int) -> Draft:
    """An errand in a shop."""
    kind, errand = rng.choice(("fact", "buy", "form")), None
    while errand is None:
        site = _site(rng, level)
        errand = {"fact": _fact, "buy": _buy, "form": _form}[kind](rng, level, site)
    demand, answer, steps = errand
    facts: dict[str, JSON] = {"kind": kind, "site": as_json(site), "steps": [[*step] for step in steps]}
    pages = ", ".join(f"/{name}" for name in (*site.categories, "cart", "delivery", "newsletter", "orders"))
    start = f"You are in the shop {site.name}. Its pages are {pages} and /returns."
    if kind == "fact":
        demand += " Answer with the number alone, and buy nothing."
    return Draft(f"{start} {demand}", answer, facts)


def outcome(cart: Sequence[str], sent: Sequence[Mapping[str, JSON]]) -> str:
    """What was done in a shop, as text: equal where it is."""
    return json.dumps({"cart": sorted(cart), "sent": sorted(sent, key=str)}, sort_keys=True)


NOTHING = outcome((), ())


def as_json(site: Site) -> dict[str, JSON]:
    """A site as JSON."""
    return cast(dict[str, JSON], json.loads(json.dumps(site._asdict())))


def from_json(value: JSON) -> Site:
    """The inverse of `as_json`."""
    parts = cast(dict[str, list[list[JSON]]], value)
    products = [
        Product(*cast(tuple[str, str, float, dict[str, float]], tuple(row))) for row in parts["products"]
    ]
    orders = [cast(tuple[str, str, str], tuple(row)) for row in parts["orders"]]
    deliveries = cast(dict[str, tuple[float, int]], parts["deliveries"])
    return Site(str(parts["name"]), products, orders, deliveries, _PAGE_SIZE)


def _site(rng: random.Random, level: int) -> Site:
    categories, count = _SIZES[level]
    names = iter(rng.sample(_NAMES, categories * count + 1))
    products = [
        Product(next(names), category, rng.randint(20, 400) / 4, _numbers(rng, category))
        for category in rng.sample([*_FACTS], categories)
        for _ in range(count)
    ]
    numbers, dates = rng.sample(range(1000, 10000), 3 + level), rng.sample(range(1, 29), 3 + level)
    items = rng.sample(products, 2)
    orders = [
        (f"{number}", f"{day} {rng.choice(_MONTHS)}", rng.choice(items).name)
        for number, day in zip(numbers, dates, strict=True)
    ]
    prices, times = rng.sample(range(4, 60), 3), rng.sample(range(1, 9), 3)
    kinds = zip(("standard", "express", "pick-up"), prices, times, strict=True)
    deliveries = {kind: (price / 4, days) for kind, price, days in kinds}
    return Site(next(names), products, orders, deliveries, _PAGE_SIZE)


def _numbers(rng: random.Random, category: str) -> dict[str, float]:
    return {
        name: round(rng.randint(low, high) * step, 1) for name, (low, high, step) in _FACTS[category].items()
    }


def _to_product(site: Site, product: Product) -> list[Step]:
    """The way to the page of a product, over the pages of its category."""
    place = [each for _, each in site.of(product.category)].index(product)
    pages: list[Step] = [("click", "next page", "")] * (place // site.page_size)
    return [("open", f"/{product.category}", ""), *pages, ("click", f"{product.name},", "")]


def _fact(rng: random.Random, level: int, site: Site) -> Errand:
    """One number of one product; of two the difference; of two the price with a delivery."""
    one, other = rng.sample(site.products, 2)
    name = rng.choice([*one.facts])
    if level == 1:
        return (
            f"How many {name} does {one.name} have, one of the {one.category}?",
            f"{one.facts[name]:g}",
            _to_product(site, one),
        )
    both = [*_to_product(site, one), *_to_product(site, other)]
    if level == 2:
        one, other = rng.sample([each for _, each in site.of(one.category)], 2)
        more = round(abs(one.facts[name] - other.facts[name]), 1)
        both = [*_to_product(site, one), *_to_product(site, other)]
        return (
            f"By how many {name} do {one.name} and {other.name} differ, both {one.category}?",
            f"{more:g}",
            both,
        )
    delivery = rng.choice([*site.deliveries])
    total = one.price + other.price + site.deliveries[delivery][0]
    demand = (
        f"How many euros do {one.name} ({one.category}) and {other.name} ({other.category}) cost together, "
    )
    return f"{demand}with {delivery} delivery?", f"{total:g}", [*both, ("open", "/delivery", "")]


def _buy(rng: random.Random, level: int, site: Site) -> Errand | None:
    """A product by name; the cheapest that fits; the cheapest that fits twice, ordered with a delivery."""
    product = rng.choice(site.products)
    put = ("click", "put into the cart", "")
    if level == 1:
        demand = f"Put {product.name}, one of the {product.category}, into the cart."
        return demand, outcome([product.name], ()), [*_to_product(site, product), put]
    needs = [*product.facts][: level - 1]
    fitting = [
        each for _, each in site.of(product.category) if all(each.facts[n] >= product.facts[n] for n in needs)
    ]
    best = min(fitting, key=lambda each: each.price)
    # Whoever takes the cheapest one of all is wrong.
    cheaper = [each for _, each in site.of(product.category) if each.price < best.price]
    if not cheaper or sum(each.price == best.price for each in fitting) > 1:
        return None
    least = " and ".join(f"{product.facts[name]:g} {name}" for name in needs)
    demand = f"the cheapest of the {best.category} that have at least {least}"
    steps = [*_to_product(site, best), put]
    if level == 2:
        return f"Put into the cart {demand}.", outcome([best.name], ()), steps
    days = rng.choice(sorted(days for _, days in site.deliveries.values())[1:])
    delivery = min((price, name) for name, (price, takes) in site.deliveries.items() if takes <= days)[1]
    fields = {"name": rng.choice(_PEOPLE), "town": rng.choice(_TOWNS), "delivery": delivery}
    who = (
        f"for {fields['name']} in {fields['town']}, with the cheapest delivery that takes {days} days at most"
    )
    goal: dict[str, JSON] = {"form": "checkout", **fields, "items": [best.name]}
    steps += [("open", "/delivery", ""), ("open", "/checkout", "")]
    steps += [*(("type", name, text) for name, text in fields.items()), ("click", "Order", "")]
    return f"Order {demand}, {who}.", outcome((), [goal]), steps


def _form(rng: random.Random, level: int, site: Site) -> Errand:
    """The newsletter; the return of an order; the returns of all orders of an item."""
    if level == 1:
        mail = f"{rng.choice(_PEOPLE).split()[0].lower()}{rng.randint(1, 999)}@{site.name.lower()}.example"
        steps: list[Step] = [
            ("open", "/newsletter", ""),
            ("type", "e-mail", mail),
            ("click", "Subscribe", ""),
        ]
        return (
            f"Subscribe {mail} to the newsletter.",
            outcome((), [{"form": "newsletter", "e-mail": mail}]),
            steps,
        )
    _, date, item = rng.choice(site.orders)
    reason = rng.choice(_REASONS)
    of_day = [each for each in site.orders if each[2] == item and (level == 3 or each[1] == date)]
    steps = [("open", "/orders", "")]
    for number, _, _ in of_day:
        fields = (("order number", number), ("reason", reason))
        steps += [("open", "/returns", ""), *(("type", *field) for field in fields), ("click", "Send", "")]
    sent: list[dict[str, JSON]] = [
        {"form": "returns", "order number": number, "reason": reason} for number, _, _ in of_day
    ]
    which = f"the order of {date} of {item}" if level == 2 else f"every order of {item}, one form each"
    return f"Return {which}; the reason is: {reason}.", outcome((), sent), steps
