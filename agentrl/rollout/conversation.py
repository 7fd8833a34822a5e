"""One agent's conversation, as messages and as tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import History, Message, Observation, Restart
from agentrl.types.seams import EpisodeRenderer, Renderer, Seen, Stops, ToolSchema


class Immediate:
    """An EpisodeRenderer that does its work on the event loop: for text that no model wrote."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """Those of the renderer."""
        return self._renderer.stops(tools)

    async def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The renderer's prompt."""
        return self._renderer.render(messages, tools)

    async def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The renderer's extension."""
        return self._renderer.extend(seen, observation, tools)

    async def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """The renderer's message."""
        return self._renderer.parse(ids, tools, prompt_ids=prompt_ids)


class Conversation:
    """A prefix that only grows, until a restart replaces it.

    Three turns and two Samples. After turn 0 the world returns new messages as usual, after turn 1 a
    `History`: it has compacted the conversation. w are tokens of the world, p are sampled:

        turn 0   observation w1 w2                turn p1 p2     prefix  w1 w2 p1 p2
        turn 1   observation w3                   turn p3        prefix  w1 w2 p1 p2 w3 p3   Sample 1
        turn 2   observation w4 w5, compacted                    prefix  w4 w5
                                                  turn p4 p5     prefix  w4 w5 p4 p5         Sample 2

    w4 w5 are the complete new prompt. Where they repeat an earlier turn of the policy, they are tokens of
    the world all the same: p1 p2 p3 are trained in Sample 1, p4 p5 in Sample 2, each exactly once.
    """

    def __init__(self, renderer: EpisodeRenderer) -> None:
        self._renderer = renderer
        self._messages: Observation = ()
        self._tools: Sequence[ToolSchema] = ()
        self._completion_ids: list[int] = []
        self.prefix: list[int] = []

    @property
    def messages(self) -> Observation:
        """All messages of the prefix. After a restart, and at the beginning, they are a complete prompt."""
        return self._messages

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """Those on offer in the last turn."""
        return self._tools

    async def add_observation(
        self, observation: Observation, tools: Sequence[ToolSchema]
    ) -> tuple[list[int], Restart | None]:
        """Append an observation; returns its tokens, and the reason where the prefix was restarted."""
        world, restart = await self._continued(observation, tools)
        self.add_rendered(observation, tools, world, restart)
        return world, restart

    def add_rendered(
        self,
        observation: Observation,
        tools: Sequence[ToolSchema],
        world: Sequence[int],
        restart: Restart | None,
    ) -> None:
        """Append an observation whose tokens are known."""
        if restart is not None:
            self.prefix.clear()
        # A History is a complete conversation; it replaces the messages before it.
        replaced = isinstance(observation, History)
        self._messages = tuple(observation) if replaced else self._messages + observation
        self._tools = tools
        self.prefix += world

    def add_turn(self, ids: Sequence[int], message: Message) -> None:
        """Append a turn of the agent, as sampled tokens and as the parsed message."""
        self.prefix += ids
        self._completion_ids = list(ids)
        self._messages += (message,)

    async def _continued(
        self, observation: Observation, tools: Sequence[ToolSchema]
    ) -> tuple[list[int], Restart | None]:
        if not self._messages:
            return await self._renderer.render(observation, tools), None
        if isinstance(observation, History):
            return await self._renderer.render(observation, tools), observation.reason
        before = self.prefix[: len(self.prefix) - len(self._completion_ids)]
        seen = Seen(self._messages, self._tools, before, self._completion_ids)
        world = await self._renderer.extend(seen, observation, tools)
        if isinstance(world, Restart):
            return await self._renderer.render(self._messages + observation, tools), world
        return world, None
