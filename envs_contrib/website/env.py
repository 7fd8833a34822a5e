"""The environment: a browser of text over the pages of a shop."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, cast

from pydantic import Field

from agentrl import Limits, Message, Script, Task, ToolRejected, call, say, tool
from agentrl.tools import JSON, inline
from envs_contrib.seeded import SeededWorld, is_number
from envs_contrib.website import errands
from envs_contrib.website.site import MOST_CHARS, Browser, Element

Number = Annotated[int, Field(ge=1, le=60)]
_CARELESS = 0.15
"""Demonstrated actions that are left out."""


class Website(SeededWorld):
    """Find a fact in a small shop, fill in its forms, or buy the cheapest product that fits.

    Its pages are text, whose links, fields and buttons have numbers: no browser, no network. What was put
    into the cart and what was sent in forms is scored; of a question the answer, where nothing was bought.
    Level 1 takes a page or two; level 2 compares pages, or copies from one into a form; level 3 has lists of
    several pages, and orders with a delivery that has to be chosen.

    seed: of all tasks; no task of one split is in another, whatever the seeds. level: 1, 2, 3; None = all.

    Raises:
        UserError: there is no such level.
    """

    limits = Limits(max_turns=40, max_tokens=12288)
    draw = staticmethod(errands.draw)

    @tool(inline=True)
    def open(self, address: str) -> str:
        """Open a page of the shop.

        Args:
            address: such as /cart
        """
        address = f"/{address.strip().strip('/')}"
        if len(address) > MOST_CHARS or not self._browser.exists(address):
            raise ToolRejected("there is no page of this address.")
        self._browser.go(address)
        return self._browser.page()

    @tool(inline=True)
    def click(self, element: Number) -> str:
        """Click a link or a button of the page.

        Args:
            element: its number on the page
        """
        found = self._element(element)
        if found.act == "field":
            raise ToolRejected("this is a field; type into it.")
        said = self._browser.act(found)
        return f"{said}\n{self._browser.page()}".strip()

    @tool(inline=True)
    def type(self, element: Number, text: str) -> str:
        """Type a text into a field of the page, in place of what is there.

        Args:
            element: the number of the field on the page
        """
        found = self._element(element)
        if found.act != "field" or len(text) > MOST_CHARS:
            raise ToolRejected(f"this is no field, or the text has more than {MOST_CHARS} characters.")
        self._browser.typed[found.target][found.label] = text.strip()
        return self._browser.page()

    @tool(inline=True)
    def back(self) -> str:
        """Go back to the page before."""
        if not self._browser.history:
            raise ToolRejected("there is no page before this one.")
        self._browser.path = self._browser.history.pop()
        return self._browser.page()

    @tool(inline=True)
    def find(self, text: str) -> str:
        """Find the lines of the page that contain a text, in any case."""
        wanted = text.strip().lower()
        lines = [line for line in self._browser.page().split("\n") if wanted and wanted in line.lower()]
        return "\n".join(lines) or "no line of this page has this text"

    tools = (open, click, type, back, find)

    @inline
    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Open the start page of the task's shop."""
        self._browser = Browser(errands.from_json(task.metadata["site"]))
        return await super().reset(task, seed=seed)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 where the right things were done; of a question, where nothing was, and the number is right."""
        done = errands.outcome(self._browser.cart, self._browser.sent)
        if task.metadata["kind"] != "fact":
            return float(done == task.answer)
        return float(done == errands.NOTHING and is_number(answer, str(task.answer)))

    @inline
    def save_state(self) -> Mapping[str, JSON]:
        """Where the browser is, the cart, and what was typed and sent."""
        names = ("path", "history", "cart", "typed", "sent")
        return cast(Mapping[str, JSON], {name: deepcopy(getattr(self._browser, name)) for name in names})

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Be in a state that `save_state` returned."""
        for name, value in state.items():
            setattr(self._browser, name, value)

    def expert(self, task: Task) -> Script:
        """Go to the pages that matter, and do there what is asked for."""
        yield from _played(task, random.Random(0), 0.0)

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert, who leaves out a click or a field now and then."""
        yield from _played(task, rng, _CARELESS)

    def _element(self, number: int) -> Element:
        element = self._browser.element(number)
        if element is None:
            raise ToolRejected("there is no element of this number on the page.")
        return element


def _played(task: Task, rng: random.Random, careless: float) -> Script:
    page = ""
    for act, target, text in cast(list[tuple[str, str, str]], task.metadata["steps"]):
        if act == "open":
            page = yield call("open", address=target)
            continue
        number = re.search(rf"^\[(\d+)\] \w+ {re.escape(target)}", page, re.MULTILINE)
        if number is None or rng.random() < careless:
            continue
        given = {"text": text} if act == "type" else {}
        page = yield call(act, element=int(number[1]), **given)
    yield say(str(task.answer) if task.metadata["kind"] == "fact" else "done")
