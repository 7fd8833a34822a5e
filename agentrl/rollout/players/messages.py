"""What the driver and a player send each other: the messages of one turn of an event loop are one list."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from agentrl.data import Prompt
from agentrl.errors import AgentRLError, WorldBrokenError
from agentrl.records.mirror import ActivityReport
from agentrl.rollout.group import GroupInProgress, GroupOutcome, GroupStep
from agentrl.runtime.stage import summary_of
from agentrl.types import Completion
from agentrl.types.seams import Sampling


class Play(NamedTuple):
    """Play a group; `Played` answers. version, begun: see `GroupPlayer.play`."""

    prompt: Prompt
    version: int
    begun: GroupInProgress | None


class CancelGroup(NamedTuple):
    """Cancel the group of that ordinal; `Played` answers, with what was played."""

    ordinal: int


class Stop(NamedTuple):
    """Stop all groups, so that they can go on later."""


class EngineAway(NamedTuple):
    """The engine has released its memory, or has it again: limits of groups do not count meanwhile."""

    is_away: bool


class ClocksStopped(NamedTuple):
    """The request waits for what is not the fault of its stages, or no longer does."""

    number: int
    is_stopped: bool


class EngineAnswer(NamedTuple):
    """The answer to a request: a completion, None to the end of a session, or an error."""

    number: int
    completion: Completion | None = None
    error: AgentRLError | None = None


class Hold(NamedTuple):
    """Send no request to the servers, and end the running ones with their tokens; `RequestsHeld` answers."""

    number: int


class Release(NamedTuple):
    """Send requests again. salt: of the weights; see `PolicyClient.release`."""

    salt: str | None


ToPlayer: TypeAlias = Play | CancelGroup | Stop | EngineAway | ClocksStopped | EngineAnswer | Hold | Release


class Opened(NamedTuple):
    """The player has its environment, and plays."""


class Failed(NamedTuple):
    """The player cannot be built: an error of the user's."""

    error: AgentRLError


class Played(NamedTuple):
    """The outcome of a group, of a cancelled one as far as it was played; or its error."""

    ordinal: int
    outcome: GroupOutcome | None = None
    error: AgentRLError | None = None


class Stepped(NamedTuple):
    """What an episode of a group has played since the last one; nothing answers."""

    step: GroupStep


class EngineRequest(NamedTuple):
    """A request to the engine."""

    number: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    session: str


class EndSession(NamedTuple):
    """Free the cache of a session."""

    number: int
    session: str


class CancelRequest(NamedTuple):
    """Cancel a request: its caller was cancelled."""

    number: int


class PlayerReport(NamedTuple):
    """What the player does at this moment, and what has ended since the last report.

    counts: of its own requests to servers; see `PolicyClient.counts`.
    """

    report: ActivityReport
    counts: Mapping[str, int]


class RequestsHeld(NamedTuple):
    """No request of the player runs. ago_s: since the first of them had ended (seconds)."""

    number: int
    ago_s: float


EngineCall: TypeAlias = EngineRequest | EndSession | CancelRequest
"""A player's use of the driver's engine."""
MemberMessage: TypeAlias = EngineCall | PlayerReport | RequestsHeld
"""About the requests of a player, and what it does; not about its groups."""
FromPlayer: TypeAlias = Opened | Failed | Played | Stepped | MemberMessage

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """Collects messages until the end of this turn of the event loop. send_all: then called with their bytes.

    failed: called with the error where they hold a value that pickle does not take; they are not sent.
    """

    def __init__(self, send_all: Callable[[bytes], None], failed: Callable[[AgentRLError], None]) -> None:
        self._send_all, self._failed = send_all, failed
        self._messages: list[Message] = []

    def add(self, message: Message) -> None:
        """Send the message after all earlier ones."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        try:
            data = pickled(messages)
        except WorldBrokenError as error:
            self._failed(error)
        else:
            self._send_all(data)


def pickled(messages: Sequence[object]) -> bytes:
    """A list of messages.

    Raises:
        WorldBrokenError: a task, or what was played of it, holds a value that pickle does not take.
    """
    try:
        return pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise WorldBrokenError(
            f"{_kinds_of(messages)} cannot be sent between the run and a player ({summary_of(error)}); keep "
            "plain data, such as JSON, in tasks and in what an environment returns."
        ) from error


def unpickled(data: bytes) -> object:
    """What the other end has sent.

    Raises:
        WorldBrokenError: it holds an object of a class that this process does not have.
    """
    try:
        return pickle.loads(data)
    except (pickle.UnpicklingError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise WorldBrokenError(
            f"what the run and a player send each other cannot be read ({summary_of(error)}); put the "
            "classes of tasks, and of what an environment returns, into a module that both can import."
        ) from error


def _kinds_of(messages: Sequence[object]) -> str:
    """What the messages are about, for a sentence."""
    ordinals = [
        message.prompt.index if isinstance(message, Play) else message.ordinal
        for message in (m.step if isinstance(m, Stepped) else m for m in messages)
        if isinstance(message, Play | Played | GroupStep)
    ]
    return f"a task or an episode of {names_of(ordinals)}" if ordinals else "a message"


def names_of(ordinals: Iterable[int]) -> str:
    """The names of groups, for a sentence."""
    return ", ".join(f"g{ordinal}" for ordinal in ordinals)
