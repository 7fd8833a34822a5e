"""Mails that ask for a change of the calendars, and what is right to do about them.

A mail that is refused breaks exactly one rule, so its number is a fact. Of two mails the second would have
another right outcome without the first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from agentrl.tools import JSON
from envs_contrib.meetings.office import (
    DAYS,
    PEOPLE,
    TOPICS,
    Calendar,
    Day,
    Meeting,
    Policy,
    broken,
    first_time,
    written,
)
from envs_contrib.seeded import Draft

Kind: TypeAlias = Literal["book", "ask", "first", "move", "mend", "cancel"]
_KINDS: Mapping[int, tuple[Sequence[Kind], ...]] = {
    1: (("book", "cancel"),),
    2: (("book", "ask", "first", "move", "mend"),),
    3: (("book", "first", "move", "mend", "cancel"), ("book", "ask", "first", "move")),
}
"""By level: the kinds that each mail of a task is one of."""
_NUM_MEETINGS = {1: 5, 2: 8, 3: 10}
_REFUSED: Mapping[Kind, float] = {"book": 0.4, "ask": 0.4, "move": 0.4, "cancel": 0.25}
"""By kind: how often a mail that comes first is refused. The one rule about cancelling is easily guessed."""
_TRIES = 30
_OFFICE = """\
You keep the calendars of Ann, Bob, Cem, Dan, Eva and Fay, from Monday to Friday. Meetings begin at full
hours. The rules are:
{policy}
Whoever asks for a new meeting organizes it and takes part. Ask the sender for what a mail leaves out. If a
mail asks for something that breaks no rule, do it, change nothing else, and reply that it is done. If it
breaks a rule, change nothing, and decline the mail with the number of the rule. Every mail gets one reply."""
_FOR_THE_FIRST = "the first time of that day at which it breaks no rule"


class Mail(NamedTuple):
    """What somebody asks for.

    wanted: the meeting as it should be; of `mend` and `cancel`, as it is. now: as it is; if new, as wanted.
    left_out: the detail that the mail does not say, `start` or `hours`; "" = none.
    """

    kind: Kind
    sender: str
    topic: str
    wanted: Meeting
    now: Meeting
    left_out: str = ""

    @property
    def text(self) -> str:
        """The mail as its reader sees it."""
        others = [name for name in self.wanted.people if name != self.sender]
        day, at = self.wanted.day, f" at {self.wanted.start}:00" if self.left_out != "start" else ""
        long = f" for {_hours(self.wanted.hours)}" if self.left_out != "hours" else ""
        match self.kind:
            case "move":
                return f"Please move the meeting {self.topic} of {self.now.day} to {day}{at}."
            case "cancel":
                return f"Please cancel the meeting {self.topic} of {day}."
            case "mend":
                return (
                    f"I am in two meetings at once on {day}. Please move the one that I organize to "
                    f"{_FOR_THE_FIRST}."
                )
            case "first":
                return (
                    f"Please book a meeting {self.topic} on {day}{long} with {_named(others)}, at "
                    f"{_FOR_THE_FIRST}."
                )
        return f"Please book a meeting {self.topic} on {day}{at}{long} with {_named(others)}."

    @property
    def details(self) -> dict[str, JSON]:
        """What the sender answers when asked."""
        if self.kind in ("mend", "cancel"):
            return {}
        known = {"day": self.wanted.day, "hours": _hours(self.wanted.hours)}
        return {**known, **({} if self.kind == "first" else {"start": f"{self.wanted.start}:00"})}


class Outcome(NamedTuple):
    """What is right: the rule that forbids it (0 = none), the call that does it, the calendars afterwards."""

    rule: int
    call: tuple[str, dict[str, JSON]] | None
    calendar: Calendar


def outcome(policy: Policy, calendar: Calendar, mail: Mail) -> Outcome | None:
    """What is right to do; None where that is not one thing."""
    meeting: Meeting | None = mail.wanted
    rules: set[int] = set()
    if mail.kind in ("move", "mend", "cancel"):
        if mail.topic not in calendar:
            return None
        now = calendar[mail.topic]
        meeting = now._replace(day=mail.wanted.day, start=mail.wanted.start)
        rules = set() if now.organizer == mail.sender else {4}
    if mail.kind in ("first", "mend") and meeting is not None:
        meeting = first_time(policy, calendar, mail.topic, meeting)
    if meeting is None:
        return None
    if mail.kind != "cancel":
        rules |= broken(policy, calendar, mail.topic, meeting)
    if len(rules) > 1:
        return None
    if rules:
        return Outcome(rules.pop(), None, calendar)
    after = {topic: other for topic, other in calendar.items() if topic != mail.topic}
    return Outcome(
        0, _call(mail, meeting), after if mail.kind == "cancel" else {**after, mail.topic: meeting}
    )


def _call(mail: Mail, meeting: Meeting) -> tuple[str, dict[str, JSON]]:
    if mail.kind == "cancel":
        return "cancel", {"topic": mail.topic}
    time: dict[str, JSON] = {"topic": mail.topic, "day": meeting.day, "start": meeting.start}
    if mail.kind in ("move", "mend"):
        return "move", time
    people: list[JSON] = [meeting.organizer, *(name for name in meeting.people if name != meeting.organizer)]
    return "book", {**time, "hours": meeting.hours, "people": people}


def draw(rng: random.Random, level: int) -> Draft:
    """A task: a policy, calendars, and one mail, or two at level 3."""
    chosen = [rng.choice(kinds) for kinds in _KINDS[level]]
    rules = [_rule(rng, level, chosen[:place], kind) for place, kind in enumerate(chosen)]
    while True:
        policy = Policy(*(rng.randint(*span) for span in ((8, 10), (15, 18), (12, 13), (3, 4), (2, 3))))
        begin = _calendar(rng, policy, _NUM_MEETINGS[level])
        if "mend" in chosen and not _doubly_booked(rng, policy, begin):
            continue
        asked: list[tuple[Mail, Outcome]] = []
        for kind, rule in zip(chosen, rules, strict=True):
            asked += _mail(rng, policy, (begin, asked), (kind, rule))
        if len(asked) == len(chosen):
            return _draft(rng, level, (policy, begin), asked)


def _rule(rng: random.Random, level: int, before: Sequence[Kind], kind: Kind) -> int:
    """The rule that a mail shall break; 0 = none. The first of two is done, and decides of the second."""
    if before:
        # A new meeting only stands in the way, and one that is cancelled no longer does.
        possible = {"book": (2, 3), "first": (2, 3), "cancel": (0,), "mend": (0, 2)}.get(before[0], (0, 2, 3))
        return 0 if kind == "first" else rng.choice(possible)
    if level == 3 or rng.random() >= _REFUSED.get(kind, 0.0):
        return 0
    return rng.choice({"move": (1, 2, 3, 4), "cancel": (4,)}.get(kind, (1, 2, 3, 5)))


def _draft(
    rng: random.Random, level: int, world: tuple[Policy, Calendar], asked: list[tuple[Mail, Outcome]]
) -> Draft:
    policy, begin = world
    names = [f"m{number}" for number in rng.sample(range(100, 1000), len(asked))]
    mails: list[JSON] = [
        {"id": name, "sender": mail.sender, "text": mail.text, "details": mail.details}
        for name, (mail, _) in zip(names, asked, strict=True)
    ]
    plan: list[JSON] = [
        {
            "mail": name,
            "rule": right.rule,
            "ask": mail.left_out,
            "days": [*dict.fromkeys((mail.now.day, mail.wanted.day))],
            "call": None if right.call is None else [*right.call],
        }
        for name, (mail, right) in zip(names, asked, strict=True)
    ]
    replies = {name: right.rule for name, (_, right) in zip(names, asked, strict=True)}
    ends = "Deal with the mails of the inbox, in their order."
    if level == 1:
        ends = f"There is one mail, {names[0]}. {asked[0][0].sender} writes: {asked[0][0].text}"
    kind = "two mails" if len(asked) > 1 else "refuse" if asked[0][1].rule else asked[0][0].kind
    facts: dict[str, JSON] = {"kind": kind, "calendar": as_json(begin), "mails": mails, "plan": plan}
    return Draft(f"{_OFFICE.format(policy=policy)}\n\n{ends}", state(asked[-1][1].calendar, replies), facts)


def state(calendar: Calendar, replies: Mapping[str, int]) -> str:
    """The calendars and the answers to mails as text: equal where both are."""
    answered = (
        f"{mail} {'declined by rule ' + str(rule) if rule else 'done'}" for mail, rule in replies.items()
    )
    return "\n".join([*written(calendar), *sorted(answered)])


def as_json(calendar: Calendar) -> dict[str, JSON]:
    """Calendars as JSON."""
    return {topic: [*meeting[:4], [*meeting.people]] for topic, meeting in calendar.items()}


def _calendar(rng: random.Random, policy: Policy, count: int) -> Calendar:
    """Meetings that break no rule, on three days."""
    calendar: Calendar = {}
    days = rng.sample(DAYS, 3)
    topics = iter(rng.sample(TOPICS, len(TOPICS)))
    for _ in range(4 * count):
        meeting = _meeting(rng, policy, days)
        if len(calendar) < count and not broken(policy, calendar, "", meeting):
            calendar[next(topics)] = meeting
    return calendar


def _meeting(
    rng: random.Random, policy: Policy, days: Sequence[Day], *, spare: int = 0, near: Meeting | None = None
) -> Meeting:
    """Any meeting of two or three people.

    spare: hours by which it may exceed its bounds. near: one of whose people and hours it has some.
    """
    people: list[str] = [*rng.sample(PEOPLE, rng.choice((2, 2, 3)))]
    start = rng.randint(policy.opens - spare, policy.closes - 1 + spare)
    if near is not None:
        start = near.start + rng.randint(-1, near.hours - 1)
        if not set(people) & set(near.people):
            people[-1] = rng.choice(near.people)
    hours = rng.randint(1, policy.longest + spare)
    return Meeting(people[0], rng.choice(days), start, hours, tuple(sorted(people)))


def _mail(
    rng: random.Random,
    policy: Policy,
    so_far: tuple[Calendar, list[tuple[Mail, Outcome]]],
    which: tuple[Kind, int],
) -> Iterator[tuple[Mail, Outcome]]:
    """A mail of a kind that breaks a rule, with its outcome; none where no luck finds one.

    so_far: the calendars at the beginning, and the mail before with its outcome. A second mail has another
    outcome than it would have without the first.
    """
    begin, before = so_far
    calendar, near = begin, None
    if before:
        first, done = before[0]
        calendar = done.calendar
        # Where the first meeting is now, or has been.
        near = calendar.get(first.topic, first.now) if which[1] else first.now
    days = _days(calendar) if near is None else [near.day]
    for _ in range(_TRIES):
        wanted = _meeting(rng, policy, days, spare=int(which[0] != "first"), near=near)
        mail = _any_mail(rng, calendar, which[0], wanted)
        right = None if mail is None else outcome(policy, calendar, mail)
        if mail is None or right is None or right.rule != which[1]:
            continue
        alone = outcome(policy, begin, mail)
        if not before or alone is None or alone[:2] != right[:2]:
            yield mail, right
            return


def _any_mail(rng: random.Random, calendar: Calendar, kind: Kind, wanted: Meeting) -> Mail | None:
    if kind in ("book", "ask", "first"):
        topic = rng.choice([name for name in TOPICS if name not in calendar])
        left_out = rng.choice(("start", "hours")) if kind == "ask" else ""
        return Mail(kind, wanted.organizer, topic, wanted, wanted, left_out)
    if kind == "mend":
        return next(_clashes(calendar), None)
    topic = rng.choice([*calendar])
    now = calendar[topic]
    sender = now.organizer if rng.random() < 0.6 else rng.choice(PEOPLE)
    if kind == "cancel":
        return Mail(kind, sender, topic, now, now)
    moved = now._replace(day=wanted.day, start=wanted.start)
    return None if moved == now else Mail(kind, sender, topic, moved, now)


def _doubly_booked(rng: random.Random, policy: Policy, calendar: Calendar) -> bool:
    """Add a meeting whose organizer is in another one at that time, and nobody else; whether it was found."""
    topic = next(name for name in TOPICS if name not in calendar)
    for _ in range(_TRIES):
        calendar[topic] = meeting = _meeting(rng, policy, _days(calendar))
        if broken(policy, calendar, topic, meeting) == {2} and [
            mail.topic for mail in _clashes(calendar)
        ] == [topic]:
            return True
    return False


def _clashes(calendar: Calendar) -> Iterator[Mail]:
    """The mails of those who are in two meetings at once, and organize one of them."""
    for (topic, meeting), other in product(calendar.items(), calendar.values()):
        who = meeting.organizer
        if meeting.overlaps(other) and who in other.people and who != other.organizer:
            yield Mail("mend", who, topic, meeting, meeting)


def _days(calendar: Calendar) -> list[Day]:
    return [meeting.day for meeting in calendar.values()]


def _hours(count: int) -> str:
    return f"{count} hour{'s' if count > 1 else ''}"


def _named(people: Sequence[str]) -> str:
    return " and ".join(people)
