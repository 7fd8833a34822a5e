"""The agent that trains: it samples every turn from a policy through a renderer, and records each token."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.errors import ConfigError
from agentrl.protocols import Act, EpisodeRenderer, Policy, Renderer, Sampling, Session, ToolSchema
from agentrl.rollout.conversation import Conversation, Immediate
from agentrl.types import Completion, Finish, Message, Observation, TurnTokens


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How an agent samples. max_response_len bounds one turn, in tokens; None = the episode's limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_len: int | None = None


class TokenAgent:
    """Plays one episode by sampling tokens; the prefix only grows, nothing is encoded twice.

    bounded: the renderer in bounded time. Without it, all of its work is done on the event loop.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        settings: SamplingSettings,
        bounded: EpisodeRenderer | None = None,
    ) -> None:
        self._policy = policy
        self._renderer = bounded or Immediate(renderer)
        self._settings = settings
        self._conversation = Conversation(self._renderer)

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """Append the observation, sample a turn and parse it.

        Where the trajectory's limit leaves no token for a turn, the turn is empty, its finish is `length`,
        and the observation is cut at that limit.

        Raises:
            ConfigError: neither the episode nor the settings limit its tokens.
        """
        conversation = self._conversation
        world, restart = await conversation.add_observation(observation, tools)
        num_free_tokens = self._num_free_tokens(session, len(conversation.prefix))
        if num_free_tokens < 1:
            # A tool may return a very long text: tokens that no policy reads must not lengthen the Sample.
            before = len(conversation.prefix) - len(world)
            num_recorded = max((session.max_tokens or 0) - before, 0)
            tokens = TurnTokens(_int32(world[:num_recorded]), _empty_completion())
            return Act(Message("assistant"), tokens, restart)
        prompt_crc32 = zlib.crc32(array("i", conversation.prefix))
        completion = await self._policy.generate(
            conversation.prefix, self._sampling(num_free_tokens, tools, session.seed), session=session.id
        )
        sampled: list[int] = completion.token_ids.tolist()
        message = await self._renderer.parse(sampled, tools, prompt_ids=conversation.prefix)
        conversation.add_turn(sampled, message)
        return Act(message, TurnTokens(_int32(world), completion, prompt_crc32), restart)

    async def close(self, session_id: str) -> None:
        """Free the engine's cache for this episode."""
        await self._policy.close_session(session_id)

    def _sampling(self, max_new_tokens: int, tools: Sequence[ToolSchema], seed: int) -> Sampling:
        stops = self._renderer.stops(tools)
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            stop=stops.strings,
            stop_token_ids=stops.token_ids,
            seed=seed,
        )

    def _num_free_tokens(self, session: Session, num_used: int) -> int:
        bounds = [] if self._settings.max_response_len is None else [self._settings.max_response_len]
        if session.max_tokens is not None:
            bounds.append(session.max_tokens - num_used)
        if not bounds:
            raise ConfigError("the environment sets no limit of tokens; set rollout_max_context_len.")
        return min(bounds)


def _int32(ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(ids, dtype=np.int32)


def _empty_completion() -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(empty, np.zeros(0, dtype=np.float32), empty.copy(), Finish.LENGTH)
