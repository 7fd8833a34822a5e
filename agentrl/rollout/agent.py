"""The agent that trains: a policy and a renderer, and every token accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.protocols import Act, Policy, Renderer, Sampling, Session, ToolSchema
from agentrl.rollout.conversation import Conversation
from agentrl.types import Completion, Finish, Message, Observation, TurnTokens


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How an agent samples. max_response_len bounds one turn, in tokens; None = the episode's limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_len: int | None = None


class TokenAgent:
    """Plays one episode by sampling tokens; the prefix only grows, nothing is encoded twice."""

    def __init__(self, policy: Policy, renderer: Renderer, settings: SamplingSettings) -> None:
        self._policy = policy
        self._renderer = renderer
        self._settings = settings
        self._conversation = Conversation(renderer)

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """Append what the world showed, sample a turn, read it.

        Where the trajectory has no room left for a single token the turn is empty, its finish is
        `length`, and what the world showed is cut at the trajectory's limit.
        """
        conversation = self._conversation
        world, restart = conversation.show(observation, tools)
        room = self._room(session, len(conversation.prefix))
        if room < 1:
            # A tool may answer with a book: what no policy will read must not make a Sample of any length.
            before = len(conversation.prefix) - len(world)
            left = max((session.max_tokens or 0) - before, 0)
            return Act(Message("assistant"), TurnTokens(_int32(world[:left]), _nothing()), restart)
        completion = await self._policy.generate(
            conversation.prefix, self._sampling(room, tools, session.seed), session=session.id
        )
        sampled: list[int] = completion.token_ids.tolist()
        message = self._renderer.parse(sampled, tools, prompt_ids=conversation.prefix)
        conversation.said(sampled, message)
        return Act(message, TurnTokens(_int32(world), completion), restart)

    async def close(self, session_id: str) -> None:
        """Free the engine's cache for this episode."""
        await self._policy.close_session(session_id)

    def _sampling(self, room: int, tools: Sequence[ToolSchema], seed: int) -> Sampling:
        stops = self._renderer.stops(tools)
        return Sampling(
            max_new_tokens=room,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            stop=stops.strings,
            stop_token_ids=stops.token_ids,
            seed=seed,
        )

    def _room(self, session: Session, num_seen: int) -> int:
        bounds = [self._settings.max_response_len]
        if session.max_tokens is not None:
            bounds.append(session.max_tokens - num_seen)
        given = [bound for bound in bounds if bound is not None]
        if not given:
            raise ValueError("a token agent needs max_tokens in the episode's limits or max_response_len")
        return min(given)


def _int32(ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(ids, dtype=np.int32)


def _nothing() -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(empty, np.zeros(0, dtype=np.float32), empty.copy(), Finish.LENGTH)
