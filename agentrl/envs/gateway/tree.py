"""The conversations of one episode as a tree of messages: what a request continues, or why it does not.

    system - question - reply 1 - result - reply 2 - thanks        begins with all of these: it continues
    reply 2
                     \\
                      reply 1b - result                            goes on beside it

A request names no other one. It continues the last reply of the longest conversation that it begins with,
where a message that its client wrote again is still the same (`same`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentrl.envs.gateway.same import changes
from agentrl.types import Completion, Message, Observation, Restart
from agentrl.types.seams import Seen, ToolSchema


@dataclass(frozen=True, slots=True, eq=False)
class SampledReply:
    """What was sampled for a request.

    number: of its request, in the order of their arrival. action: as it was parsed. sent: the same as its
    client was sent it. ids: those of the calls that were sent -> those of the action's. seen: what the next
    turn goes on from. completion: the tokens; None = its agent has none. previous: the reply whose tokens
    these go on from; None = they follow a whole prompt. reason: why it goes on from none, or beside another
    from the same.
    """

    number: int
    action: Message
    sent: Message
    ids: Mapping[str, str]
    seen: Seen
    completion: Completion | None
    previous: SampledReply | None
    reason: Restart


@dataclass(eq=False, slots=True)
class Vertex:
    """A message after another one.

    message: None = the root, before all of them. longest: messages of the longest request through it
    (count). changed: the kinds of changes that clients have made in it.
    """

    message: Message | None
    parent: Vertex | None = None
    reply: SampledReply | None = None
    depth: int = 0
    longest: int = 0
    changed: set[str] = field(default_factory=set)
    children: list[Vertex] = field(default_factory=list)

    def add(self, message: Message, reply: SampledReply | None = None) -> Vertex:
        """A new message after this one."""
        child = Vertex(message, self, reply, self.depth + 1)
        self.children.append(child)
        return child

    def path(self) -> list[Vertex]:
        """The messages up to this one, in their order."""
        path, vertex = list[Vertex](), self
        while vertex.parent is not None:
            path.append(vertex)
            vertex = vertex.parent
        return path[::-1]


class Place(NamedTuple):
    """Where a request stands.

    end: its last message, after which its replies come. messages: all of them, with replies as they were
    parsed. continued: the last reply that it begins with; None = it begins with none. new: the messages after
    that. reason: why it does not go on where another one has ended, if it does not. changed: the kinds of
    changes that its client has made in messages, each counted once for a message.
    """

    end: Vertex
    messages: Observation
    continued: SampledReply | None
    new: Observation
    reason: Restart
    changed: Mapping[str, int]


class _State(NamedTuple):
    """A way through the tree that a request may have come. kinds: of changes, with the message of each.
    ids: of the client's calls -> those that it was sent. last: depth of the last reply."""

    vertex: Vertex
    kinds: tuple[tuple[Vertex, str], ...] = ()
    ids: Mapping[str, str] = {}
    last: int = 0

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """The larger, the likelier: a reply that nothing has continued is, of equal ones."""
        return self.last, self.vertex.depth, -len(self.kinds), -len(self.vertex.children)

    def following(self, message: Message, tools: Sequence[ToolSchema]) -> list[_State]:
        """The ways on with a message."""
        found = []
        for child in self.vertex.children:
            assert child.message is not None, "only the root is none"
            difference = changes(child.message, message, self.ids, tools)
            if difference is not None:
                kinds = (*self.kinds, *((child, kind) for kind in sorted(difference.kinds)))
                ids = {**self.ids, **difference.ids} if difference.ids else self.ids
                found.append(_State(child, kinds, ids, self.last if child.reply is None else child.depth))
        return found


class ConversationTree:
    """The messages of all requests and replies of an episode."""

    def __init__(self) -> None:
        self._root = Vertex(None)

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Place:
        """Find where a request stands, and add the messages that are new.

        messages: at least one. tools: on offer.
        """
        state = self._walked(messages, tools)
        end = state.vertex
        reason = _reason(messages, end)
        for message in messages[end.depth :]:
            named = state.ids.get(message.tool_call_id or "")
            end = end.add(message if named is None else replace(message, tool_call_id=named))
        path = end.path()
        for vertex in path:
            vertex.longest = max(vertex.longest, len(messages))
        new = [(vertex, kind) for vertex, kind in state.kinds if kind not in vertex.changed]
        for vertex, kind in new:
            vertex.changed.add(kind)
        parsed = _parsed(path)
        continued = path[state.last - 1].reply if state.last else None
        changed = Counter(kind for _, kind in new)
        return Place(end, parsed, continued, parsed[state.last :], reason, changed)

    def _walked(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> _State:
        """The likeliest way of a request: to as many messages as possible."""
        states, ended = [_State(self._root)], list[_State]()
        for message in messages:
            following: list[_State] = []
            for state in states:
                further = state.following(message, tools)
                following += further
                if not further:
                    ended.append(state)
            states = following
        return max((*ended, *states), key=lambda state: state.rank)


def _parsed(path: Sequence[Vertex]) -> Observation:
    """The messages of a conversation, its replies as they were parsed, and with their ids in the results."""
    ids: dict[str, str] = {}
    messages: list[Message] = []
    for vertex in path:
        message = vertex.message
        assert message is not None, "only the root is none"
        if vertex.reply is not None:
            ids.update(vertex.reply.ids)
            message = vertex.reply.action
        elif message.tool_call_id in ids:
            message = replace(message, tool_call_id=ids[message.tool_call_id])
        messages.append(message)
    return tuple(messages)


def _reason(messages: Sequence[Message], last: Vertex) -> Restart:
    """Why a request goes another way than those before it after `last`, if there are any.

    One that shares no more than the system's words with any is another agent's: that of a sub-agent, or of
    one that was handed the task, unless its first message is a longer form of another one's. One that is as
    long as another stands beside it, and so does one that repeats what was asked before.
    """
    if len(messages) == last.depth:
        return Restart.PARALLEL
    if all(message.role == "system" for message in messages[: last.depth]):
        return Restart.REWRITTEN if _extends(messages[last.depth], last.children) else Restart.SUB_AGENT
    if len(messages) == last.longest:
        return Restart.PARALLEL
    return Restart.COMPACTED if len(messages) < last.longest else Restart.REWRITTEN


def _extends(message: Message, others: Sequence[Vertex]) -> bool:
    """Whether a message that is not the system's begins with the text of another one in its place.

    Clients that write results into the user's message have such ones.
    """
    texts = [other.message.text for other in others if other.message and other.message.role == message.role]
    return message.role != "system" and any(text and message.text.startswith(text) for text in texts)
