"""What one agent has seen and said, as messages and as tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.protocols import Renderer, Seen, ToolSchema
from agentrl.types import History, Message, Observation, Restart


class Conversation:
    """A prefix that only grows, until it has to begin anew.

    Three turns and two Samples. The world answers turn 0 as usual and turn 1 with a `History`, having
    compacted what was said; w are tokens of the world, p are sampled:

        turn 0   show -> w1 w2        said p1 p2     prefix  w1 w2 p1 p2
        turn 1   show -> w3           said p3        prefix  w1 w2 p1 p2 w3 p3     Sample 1
        turn 2   show -> w4 w5, compacted            prefix  w4 w5
                                      said p4 p5     prefix  w4 w5 p4 p5           Sample 2

    w4 w5 are the whole new prompt. Where it repeats what the policy once said, it does so in the world's
    words: p1 p2 p3 are trained in Sample 1, p4 p5 in Sample 2, each exactly once.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._messages: Observation = ()
        self._tools: Sequence[ToolSchema] = ()
        self._completion_ids: list[int] = []
        self.prefix: list[int] = []

    def show(self, observation: Observation, tools: Sequence[ToolSchema]) -> tuple[list[int], Restart | None]:
        """The tokens of what the world shows, appended to the prefix, and why that had to begin anew."""
        world, restart = self._continued(observation, tools)
        if restart is not None:
            self.prefix.clear()
        # A History is a whole conversation, not something to be added to one.
        replaced = isinstance(observation, History)
        self._messages = tuple(observation) if replaced else self._messages + observation
        self._tools = tools
        self.prefix += world
        return world, restart

    def said(self, ids: Sequence[int], message: Message) -> None:
        """Append a turn of the agent's, as sampled and as read."""
        self.prefix += ids
        self._completion_ids = list(ids)
        self._messages += (message,)

    def _continued(
        self, observation: Observation, tools: Sequence[ToolSchema]
    ) -> tuple[list[int], Restart | None]:
        if not self._messages:
            return self._renderer.render(observation, tools), None
        if isinstance(observation, History):
            return self._renderer.render(observation, tools), observation.reason
        before = self.prefix[: len(self.prefix) - len(self._completion_ids)]
        seen = Seen(self._messages, self._tools, before, self._completion_ids)
        world = self._renderer.extend(seen, observation, tools)
        if isinstance(world, Restart):
            return self._renderer.render(self._messages + observation, tools), world
        return world, None
