"""The environment: tools over the calendars of an office, and its state at the end."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Field

from agentrl import Limits, Message, Script, Task, ToolRejected, call, say, tool
from agentrl.tools import JSON, inline
from envs_contrib.meetings import requests
from envs_contrib.meetings.office import NUM_RULES, Calendar, Day, Meeting, Person, written
from envs_contrib.seeded import SeededWorld

Hour = Annotated[int, Field(ge=0, le=23)]
_MOST_CHARS, _MOST_MEETINGS = 40, 50
_CARELESS = 0.25
"""Demonstrated replies that are another one."""


class Meetings(SeededWorld):
    """Mails ask for meetings to be booked, moved or cancelled; a policy forbids some of it.

    Tools change calendars without asking the policy: only the calendars at the end, and the replies, are
    scored. A mail that breaks a rule has to be declined with the number of the rule. The sender of a mail
    answers questions about what it leaves out. At level 1 the prompt has the mail; at level 2 it has to be
    read, and asked about, or a time has to be found; at level 3 there are two mails, and the first decides
    what is right for the second.

    seed: of all tasks; no task of one split is in another, whatever the seeds. level: 1, 2, 3; None = all.

    Raises:
        UserError: there is no such level.
    """

    limits = Limits(max_turns=16, max_tokens=4096)
    draw = staticmethod(requests.draw)

    @tool(inline=True)
    def inbox(self) -> str:
        """Read the mails, the oldest first."""
        return "\n".join(f"{mail['id']} from {mail['sender']}: {mail['text']}" for mail in self._mails)

    @tool(inline=True)
    def calendar(self, day: Day) -> str:
        """See all meetings of a day: topic, time, organizer, and who else takes part."""
        return "\n".join(written(self._calendar, day)) or "no meetings"

    @tool(inline=True)
    def book(
        self,
        topic: str,
        day: Day,
        start: Hour,
        hours: Annotated[int, Field(ge=1, le=9)],
        people: list[Person],
    ) -> str:
        """Book a meeting.

        Args:
            topic: its name, which no other meeting has
            start: the hour at which it begins
            hours: how many it takes
            people: who takes part; the first one organizes it
        """
        if topic in self._calendar or not 0 < len(topic.strip()) <= _MOST_CHARS:
            raise ToolRejected("a meeting needs a short topic that no other one has.")
        if not people or len(self._calendar) == _MOST_MEETINGS:
            raise ToolRejected("a meeting needs people, and the calendars a place for it.")
        self._calendar[topic] = Meeting(people[0], day, start, hours, tuple(sorted(set(people))))
        return f"booked: {self._calendar[topic]}"

    @tool(inline=True)
    def move(self, topic: str, day: Day, start: Hour) -> str:
        """Move a meeting to another time."""
        self._calendar[topic] = self._named(topic)._replace(day=day, start=start)
        return f"moved: {self._calendar[topic]}"

    @tool(inline=True)
    def cancel(self, topic: str) -> str:
        """Cancel a meeting."""
        self._named(topic)
        return f"cancelled: {self._calendar.pop(topic)}"

    @tool(inline=True)
    def ask(self, mail: str, about: Literal["day", "start", "hours", "people"]) -> str:
        """Ask the sender of a mail about what it leaves out.

        Args:
            mail: the id of the mail
        """
        details = cast(dict[str, str], self._mail(mail)["details"])
        return details.get(about, "I have nothing to add to my mail.")

    @tool(inline=True)
    def reply(
        self,
        mail: str,
        decision: Literal["done", "declined"],
        rule: Annotated[int, Field(ge=0, le=NUM_RULES)] = 0,
    ) -> str:
        """Reply to a mail, once.

        Args:
            mail: the id of the mail
            rule: where it is declined, the number of the rule
        """
        self._mail(mail)
        if mail in self._replies:
            raise ToolRejected("this mail has its reply already.")
        if (decision == "declined") != (rule > 0):
            raise ToolRejected("give the number of a rule where you decline, and none where it is done.")
        self._replies[mail] = rule
        return "sent"

    tools = (inbox, calendar, book, move, cancel, ask, reply)

    @inline
    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin with the mails and the calendars of the task."""
        self._mails = cast(list[dict[str, JSON]], task.metadata["mails"])
        self.load_state({"calendar": task.metadata["calendar"], "replies": {}})
        return await super().reset(task, seed=seed)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 where calendars and replies are right in the end, whatever the model says about them."""
        del answer
        return float(requests.state(self._calendar, self._replies) == task.answer)

    @inline
    def save_state(self) -> Mapping[str, JSON]:
        """The calendars and the replies."""
        return {"calendar": requests.as_json(self._calendar), "replies": dict(self._replies)}

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Be in a state that `save_state` returned."""
        rows = cast(dict[str, tuple[str, Day, int, int, list[str]]], state["calendar"])
        self._calendar: Calendar = {topic: Meeting(*row[:4], tuple(row[4])) for topic, row in rows.items()}
        self._replies: dict[str, int] = dict(cast(dict[str, int], state["replies"]))

    def expert(self, task: Task) -> Script:
        """Read, look at the day, ask for what is left out, change what is asked for, reply."""
        yield from _played(task, random.Random(0), 0.0)

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert with other replies now and then, and without what a declined mail would have needed."""
        yield from _played(task, rng, _CARELESS)

    def _named(self, topic: str) -> Meeting:
        if topic not in self._calendar:
            raise ToolRejected("there is no meeting of this topic; look at the calendar.")
        return self._calendar[topic]

    def _mail(self, id: str) -> dict[str, JSON]:
        mail = next((mail for mail in self._mails if mail["id"] == id), None)
        if mail is None:
            raise ToolRejected("there is no mail of this id; read the inbox.")
        return mail


def _played(task: Task, rng: random.Random, careless: float) -> Script:
    if task.metadata["level"] != 1:
        yield call("inbox")
    for part in cast(list[dict[str, JSON]], task.metadata["plan"]):
        for day in cast(list[str], part["days"]):
            yield call("calendar", day=day)
        if part["ask"]:
            yield call("ask", mail=part["mail"], about=part["ask"])
        rule = rng.randint(0, NUM_RULES) if rng.random() < careless else part["rule"]
        if part["call"] and not rule:
            name, arguments = cast(tuple[str, dict[str, JSON]], part["call"])
            yield call(name, **arguments)
        yield call("reply", mail=part["mail"], decision="declined" if rule else "done", rule=rule)
    yield say("done")
