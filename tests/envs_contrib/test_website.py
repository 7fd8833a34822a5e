"""Website: a solver that reads pages agrees with every errand, and nothing else is paid."""

from __future__ import annotations

import asyncio
import re

from agentrl import Limits, ScriptedAgent, call, play, say
from agentrl.envs.check import check_env
from envs_contrib.website import Website

DONE = say("done")
LINE = re.compile(r"^\[(\d+)\] (\w+) (.*)$", re.MULTILINE)


class Patient(Website):
    """With time to read every page."""

    limits = Limits(max_turns=200)


def number_of(page, label):
    return next(int(number) for number, _, text in LINE.findall(page) if text.startswith(label))


def crawled(category):
    """All products of a category: name -> (price, facts, address)."""
    page = yield call("open", address=f"/{category}")
    products, prices = {}, {}
    while True:
        for number, kind, text in LINE.findall(page):
            if kind == "link" and "euros" in text:
                name, price = re.match(r"(\w+), ([\d.]+) euros", text).groups()
                detail = yield call("click", element=int(number))
                facts = {
                    key: float(value) for key, value in re.findall(r"^(\w+): ([\d.]+)$", detail, re.MULTILINE)
                }
                products[name], prices[name] = facts, float(price)
                page = yield call("back")
        if "next page" not in page:
            return products, prices
        page = yield call("click", element=number_of(page, "next page"))


def into_cart(category, name):
    page = yield call("open", address=f"/{category}")
    while f"] link {name}," not in page:
        page = yield call("click", element=number_of(page, "next page"))
    page = yield call("click", element=number_of(page, f"{name},"))
    yield call("click", element=number_of(page, "put into"))


def filled(form, **fields):
    page = yield call("open", address=f"/{form}")
    for name, text in fields.items():
        page = yield call("type", element=number_of(page, name.replace("_", " ")), text=text)
    button = next(int(number) for number, kind, _ in LINE.findall(page) if kind == "button")
    yield call("click", element=button)


def deliveries():
    page = yield call("open", address="/delivery")
    rows = re.findall(r"^([\w-]+): ([\d.]+) euros, (\d+) days$", page, re.MULTILINE)
    return {name: (float(price), int(days)) for name, price, days in rows}


def solver(text):
    if match := re.search(r"How many (\w+) does (\w+) have, one of the (\w+)\?", text):
        products, _ = yield from crawled(match[3])
        yield say(f"{products[match[2]][match[1]]:g}")
    elif match := re.search(r"By how many (\w+) do (\w+) and (\w+) differ, both (\w+)\?", text):
        products, _ = yield from crawled(match[4])
        yield say(f"{abs(products[match[2]][match[1]] - products[match[3]][match[1]]):.1f}")
    elif match := re.search(r"do (\w+) \((\w+)\) and (\w+) \((\w+)\) cost together, with ([\w-]+) del", text):
        total = 0.0
        for name, category in ((match[1], match[2]), (match[3], match[4])):
            _, prices = yield from crawled(category)
            total += prices[name]
        costs = yield from deliveries()
        yield say(f"{total + costs[match[5]][0]:.2f}")
    elif match := re.search(r"Put (\w+), one of the (\w+),", text):
        yield from into_cart(match[2], match[1])
        yield DONE
    elif match := re.search(r"the cheapest of the (\w+) that have at least (.*?)(?:\.$|, for (.*))", text):
        yield from bought(match[1], match[2], match[3])
        yield DONE
    else:
        yield from forms(text)
        yield DONE


def bought(category, needs, order):
    least = [(float(number), name) for number, name in re.findall(r"([\d.]+) ([a-z]+)", needs)]
    products, prices = yield from crawled(category)
    fitting = [name for name, facts in products.items() if all(facts[key] >= number for number, key in least)]
    yield from into_cart(category, min(fitting, key=prices.get))
    if order:
        name, town, days = re.match(r"([\w ]+) in (\w+), .* takes (\d+) days", order).groups()
        costs = yield from deliveries()
        chosen = min((price, kind) for kind, (price, takes) in costs.items() if takes <= int(days))[1]
        yield from filled("checkout", name=name, town=town, delivery=chosen)


def forms(text):
    if match := re.search(r"Subscribe (\S+) to", text):
        yield from filled("newsletter", **{"e-mail": match[1]})
        return
    match = re.search(
        r"Return (?:the order of (.*) of|every order of) (\w+)[;,].*the reason is: (.*)\.$", text
    )
    page = yield call("open", address="/orders")
    for number, date, item in re.findall(r"^order (\d+) of (.*): (\w+)$", page, re.MULTILINE):
        if item == match[2] and match[1] in (None, date):
            yield from filled("returns", order_number=number, reason=match[3])


def played(task, *actions):
    return asyncio.run(play(Website(), ScriptedAgent(iter(actions)), task, seed=0)).step_rewards[-1]


def of_kind(kind, level):
    return next(task for task in Website(level=level).tasks("test") if task.metadata["kind"] == kind)


def test_a_solver_that_reads_pages_agrees_with_every_errand():
    for task in Website().tasks("test"):
        episode = asyncio.run(play(Patient(), ScriptedAgent(solver(task.prompt[0].text)), task, seed=0))
        assert episode.step_rewards[-1] == 1.0, (task.prompt[0].text, task.answer)


def test_the_first_level_takes_four_calls_at_most():
    for task in Website(level=1).tasks("test")[:40]:
        episode = asyncio.run(play(Website(), ScriptedAgent(Website().expert(task)), task, seed=0))
        assert (episode.step_rewards[-1], episode.counts["tool_calls"] <= 3) == (1.0, True)


def test_of_a_question_only_the_number_is_paid_and_only_where_nothing_was_done():
    task = of_kind("fact", 1)
    assert played(task, say(task.answer)) == 1.0
    assert played(task, say(f"{task.answer} or so")) == 0.0
    assert played(task, say(str(float(task.answer) + 1))) == 0.0
    product = task.metadata["site"]["products"][0]
    assert played(task, *_put(product), say(task.answer)) == 0.0


def _put(product):
    """Calls of somebody who knows the pages: the products of the first category are on its first page."""
    name, category, *_ = product
    assert name
    return call("open", address=f"/{category}"), call("click", element=1), call("click", element=1)


def test_a_cart_with_one_more_or_one_less_item_is_worth_nothing():
    task = of_kind("buy", 1)
    script = [*steps(into_cart(*_wanted(task)), task), DONE]
    assert played(task, *script) == 1.0
    assert played(task, DONE) == 0.0
    assert played(task, *script[:-1], script[-2], DONE) == 0.0
    taken_out = [call("open", address="/cart"), call("click", element=1), DONE]
    assert played(task, *script[:-1], *taken_out) == 0.0


def _wanted(task):
    name, category = re.search(r"Put (\w+), one of the (\w+),", task.prompt[0].text).groups()
    return category, name


def steps(script, task):
    """The actions of a script in a world of its own."""
    env = Website()
    asyncio.run(env.reset(task, seed=0))
    actions, said = [], None
    while True:
        try:
            actions.append(script.send(said))
        except StopIteration:
            return actions
        said = asyncio.run(env.step(actions[-1])).observation[0].text


def test_forms_are_sent_whole_and_calls_that_make_no_sense_are_refused():
    task = of_kind("form", 1)
    (mail,) = re.findall(r"Subscribe (\S+) to", task.prompt[0].text)
    opened, typed = call("open", address="/newsletter"), call("type", element=1, text=mail)
    send = call("click", element=2)
    assert played(task, opened, typed, send, DONE) == 1.0
    assert played(task, opened, send, typed, DONE) == 0.0
    assert played(task, opened, typed, send, typed, send, DONE) == 0.0
    wrong = [
        call("open", address="/nowhere"), call("open", address="/product/999999999999999999999"),
        call("open", address="x" * 10_000), call("open", address="http://127.0.0.1"), call("back"),
        call("click", element=60), call("type", element=1, text="x"), opened, call("click", element=1),
        call("type", element=2, text="x"), call("type", element=1, text="x" * 1000), typed, send,
    ]  # fmt: skip
    episode = asyncio.run(play(Website(), ScriptedAgent(iter([*wrong, DONE])), task, seed=0))
    assert episode.counts["rejected_calls"] == len(wrong) - 3
    assert episode.step_rewards[-1] == 1.0


def test_it_is_worth_training_on():
    assert check_env(Website, n=4).findings == ()
