"""The calendars of an office, and the rules that a change of them may break."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

Day: TypeAlias = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
Person: TypeAlias = Literal["Ann", "Bob", "Cem", "Dan", "Eva", "Fay"]

DAYS: tuple[Day, ...] = get_args(Day)
PEOPLE: tuple[Person, ...] = get_args(Person)
TOPICS = (
    *("Accounts", "Budget", "Catering", "Deadlines", "Energy", "Fairs", "Grants", "Hiring", "Insurance"),
    *("Journals", "Kitchen", "Logistics", "Moving", "Newsletter", "Orders", "Parking", "Quality", "Repairs"),
    *("Sales", "Training", "Uniforms", "Visitors", "Website"),
)
NUM_RULES = 5


class Meeting(NamedTuple):
    """organizer: one of people. day, start: an hour of the day. hours: how many it takes."""

    organizer: str
    day: Day
    start: int
    hours: int
    people: tuple[str, ...]

    def overlaps(self, other: Meeting) -> bool:
        """Whether both are at the same time."""
        return (
            self.day == other.day
            and self.start < other.start + other.hours
            and other.start < self.start + self.hours
        )

    def __str__(self) -> str:
        people = ", ".join(name for name in self.people if name != self.organizer)
        times = f"{self.day} {self.start}:00-{self.start + self.hours}:00"
        return f"{times}, {self.organizer}{f' with {people}' if people else ''}"


Calendar: TypeAlias = dict[str, Meeting]
"""Meetings by their topics."""


class Policy(NamedTuple):
    """Meetings lie from `opens` to `closes`, outside of the hour `lunch`, and take `longest` at most.

    most: hours of meetings that somebody may have on a day.
    """

    opens: int
    closes: int
    lunch: int
    most: int
    longest: int

    def __str__(self) -> str:
        rules = (
            f"Meetings lie between {self.opens}:00 and {self.closes}:00, and none touches the hour from "
            f"{self.lunch}:00 to {self.lunch + 1}:00.",
            "Nobody is in two meetings at the same time.",
            f"Nobody has more than {self.most} hours of meetings on a day.",
            "A meeting is moved or cancelled only where its organizer asks for it.",
            f"No meeting takes more than {self.longest} hours.",
        )
        return "\n".join(f"{number}. {rule}" for number, rule in enumerate(rules, start=1))


def broken(policy: Policy, calendar: Mapping[str, Meeting], topic: str, meeting: Meeting) -> set[int]:
    """The numbers of the rules that a meeting breaks at its place, but for 4, which is about who asks."""
    others = [other for name, other in calendar.items() if name != topic and other.day == meeting.day]
    end = meeting.start + meeting.hours
    numbers = {
        1: meeting.start < policy.opens or end > policy.closes or meeting.start <= policy.lunch < end,
        2: any(meeting.overlaps(other) and set(meeting.people) & set(other.people) for other in others),
        3: any(_hours(person, others) + meeting.hours > policy.most for person in meeting.people),
        5: meeting.hours > policy.longest,
    }
    return {number for number, breaks in numbers.items() if breaks}


def first_time(
    policy: Policy, calendar: Mapping[str, Meeting], topic: str, meeting: Meeting
) -> Meeting | None:
    """The meeting at the first hour of its day at which it breaks no rule; None = there is none."""
    at_every_hour = (meeting._replace(start=start) for start in range(policy.opens, policy.closes))
    return next((each for each in at_every_hour if not broken(policy, calendar, topic, each)), None)


def _hours(person: str, meetings: list[Meeting]) -> int:
    return sum(meeting.hours for meeting in meetings if person in meeting.people)


def written(calendar: Mapping[str, Meeting], day: Day | None = None) -> Iterator[str]:
    """The meetings of a day, or of all, in the order of their times."""
    in_order = sorted(calendar.items(), key=lambda item: (DAYS.index(item[1].day), item[1].start, item[0]))
    return (f"{topic}: {meeting}" for topic, meeting in in_order if day in (None, meeting.day))
