"""An environment with state: the diary of a room, which tools read and change."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import cast

from agentrl import Limits, Message, Script, Task, ToolEnv, ToolRejected, UserError, call, say, tool
from agentrl.tools import JSON, inline

HOURS = (9, 10, 11, 12, 1, 2)
PEOPLE = ("ann", "bob", "cem", "dan", "eva", "fay", "gus", "hal", "ida", "jon")
KINDS = ("free", "taken", "moves")
SPLITS = {"train": slice(0, 1500), "validation": slice(1500, 1800), "test": slice(1800, 2100)}
_BOOKING = re.compile(r"(\d+) (\w+)")


class Desk(ToolEnv):
    """Give somebody an hour. Everybody has one at most, so another booking may be in the way."""

    limits = Limits(max_turns=6, max_tokens=224)
    splits = tuple(SPLITS)
    breakdown = "kind"

    @tool(inline=True)
    def see(self) -> str:
        """Read the diary."""
        return written(self.diary)

    @tool(inline=True)
    def cancel(self, hour: int) -> str:
        """Cancel the booking of an hour."""
        if str(hour) not in self.diary:
            raise ToolRejected("nobody has this hour")
        return f"cancelled {self.diary.pop(str(hour))}"

    @tool(inline=True)
    def book(self, hour: int, person: str) -> str:
        """Book a free hour for somebody who has none."""
        if hour not in HOURS or person not in PEOPLE:
            raise ToolRejected("no such hour or person")
        if str(hour) in self.diary or person in self.diary.values():
            raise ToolRejected("in the way")
        self.diary[str(hour)] = person
        return "booked"

    tools = (see, cancel, book)

    def tasks(self, split: str) -> Sequence[Task]:
        """A third each of three kinds: the hour is free, somebody has it, or the person has another one.

        Raises:
            UserError: no such split.
        """
        if split not in SPLITS:
            raise UserError(f"Desk has no split `{split}`; take {', '.join(SPLITS)}.")
        return requests()[SPLITS[split]]

    @inline
    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Open the task's diary."""
        self.diary = dict(cast(dict[str, str], task.metadata["diary"]))
        return await super().reset(task, seed=seed)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 where the diary is right in the end, whatever the model says about it."""
        del answer
        return float(written(self.diary) == task.answer)

    @inline
    def save_state(self) -> Mapping[str, JSON]:
        """The diary; the package saves the rest."""
        return {"diary": dict(self.diary)}

    def expert(self, task: Task) -> Script:
        """Look, cancel what is in the way, book."""
        diary = yield call("see")
        for hour, name in _BOOKING.findall(diary):
            if name != "free" and (name == task.metadata["person"] or hour == str(task.metadata["hour"])):
                yield call("cancel", hour=int(hour))
        yield from booked(task)

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """In six of ten episodes it forgets what is in the way, or cancels any hour."""
        chance = rng.random()
        if chance < 0.4:
            yield from self.expert(task)
            return
        if chance < 0.6:
            yield call("see")
        if chance > 0.8:
            yield call("cancel", hour=rng.choice(HOURS))
        yield from booked(task)


def booked(task: Task) -> Script:
    """The last two actions of every script."""
    yield call("book", hour=task.metadata["hour"], person=task.metadata["person"])
    yield say("done")


def written(diary: Mapping[str, str]) -> str:
    """The diary as the model reads it."""
    return ", ".join(f"{hour} {diary.get(str(hour), 'free')}" for hour in HOURS)


@cache
def requests() -> list[Task]:
    """All tasks. No two of them have one prompt and one goal."""
    rng = random.Random(0)
    tasks: dict[tuple[str, str | None], Task] = {}
    while len(tasks) < 2100:
        task = request(rng, KINDS[len(tasks) % 3], f"desk-{len(tasks)}")
        tasks.setdefault((task.prompt[0].text, task.answer), task)
    return list(tasks.values())


def request(rng: random.Random, kind: str, name: str) -> Task:
    """A diary of two to four bookings, and who wants which hour."""
    number = rng.randint(2, 4)
    hour, *hours = rng.sample(HOURS, number + 1)
    person, *others = rng.sample(PEOPLE, number + 1)
    diary = {str(at): other for at, other in zip(hours, others, strict=True)}
    if kind == "moves":
        diary[str(hours[0])] = person
    goal = {at: other for at, other in diary.items() if other != person} | {str(hour): person}
    if kind == "taken":
        diary[str(hour)] = rng.choice([other for other in PEOPLE if other not in (person, *others)])
    facts: dict[str, JSON] = {"kind": kind, "hour": hour, "person": person, "diary": dict(diary)}
    return Task.ask(name, f"Give {hour} to {person}.", written(goal), **facts)
