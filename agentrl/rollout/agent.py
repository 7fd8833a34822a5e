"""The agents that train: they sample every turn from a policy through a renderer, and record each token."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from agentrl.algorithms.distillation import privileged_prompt
from agentrl.envs.resuming import ResumableAgent, SavedTurns, TurnStoppedError
from agentrl.errors import ConfigError
from agentrl.records import lines
from agentrl.rollout.conversation import Conversation, Immediate
from agentrl.runtime.activity import requesting
from agentrl.runtime.clocks import SharedDeadline
from agentrl.types import JSON, Completion, ExpertLayers, Finish, Message, Observation, Restart, TurnTokens
from agentrl.types.seams import (
    Act,
    Agent,
    EpisodeRenderer,
    Policy,
    Renderer,
    Sampling,
    Seen,
    Session,
    StreamingPolicy,
    Tokenizer,
    ToolSchema,
    Watch,
)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How an agent samples.

    max_response_len: of one turn, in tokens; None = the episode's limit. return_kept_ids,
    return_routed_experts: see `Sampling`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_len: int | None = None
    return_kept_ids: bool = False
    return_routed_experts: ExpertLayers | None = None


class _Turn(NamedTuple):
    """A turn that has begun: its tokens of the world, why its prefix was restarted, what was sampled.

    privileged: of the first turn of a trajectory, the prompt that the teacher reads.
    """

    world: tuple[int, ...]
    restart: Restart | None
    sampled: Completion | None = None
    privileged: tuple[int, ...] | None = None


class _State(NamedTuple):
    """What an agent saves beside its turns.

    tools: of its last turn; None = they are on offer still. turn: the one that was stopped.
    """

    tools: tuple[ToolSchema, ...] | None
    turn: _Turn | None


@lru_cache(maxsize=1)
def _states() -> TypeAdapter[_State]:
    return TypeAdapter(_State)


class _Sessions:
    """The sessions of an episode for the engine, which runs one request at a time in each. names: of all."""

    def __init__(self) -> None:
        self.names: dict[str, bool] = {}

    @contextmanager
    def free(self, session_id: str) -> Iterator[str]:
        """One that runs no request, for one; the first is the episode's own."""
        names = chain([session_id], (f"{session_id}#{number}" for number in count(1)))
        name = next(name for name in names if not self.names.get(name))
        self.names[name] = True
        try:
            yield name
        finally:
            self.names[name] = False


class TokenAgent:
    """Plays one episode by sampling tokens; the prefix only grows, nothing is encoded twice.

    bounded: the renderer in bounded time. Without it, all of its work is done on the event loop.
    privileged_text: what a teacher reads besides the prompt, and the policy does not; None = nothing.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        settings: SamplingSettings,
        bounded: EpisodeRenderer | None = None,
    ) -> None:
        self._policy = policy
        self._plain = renderer
        self._renderer = bounded or Immediate(renderer)
        self._settings = settings
        self._conversation = Conversation(self._renderer)
        self._turn: _Turn | None = None
        self._is_stopping = False
        self._sessions = _Sessions()
        self.privileged_text: str | None = None

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """Append the observation, sample a turn and parse it.

        Where the trajectory's limit leaves no token for a turn, the turn is empty, its finish is `length`,
        and the observation is cut at that limit.

        Raises:
            ConfigError: neither the episode nor the settings limit its tokens.
            TurnStoppedError: `stop` was called; the next `act` goes on with this turn.
        """
        conversation, turn = self._conversation, self._turn
        if turn is None:
            turn = await self._begun(observation, tools)
        else:
            conversation.add_rendered(observation, tools, turn.world, turn.restart)
        world, restart = turn.world, turn.restart
        num_free_tokens = self._num_free_tokens(session, len(conversation.prefix))
        if num_free_tokens < 1:
            # A tool may return a very long text: tokens that no policy reads must not lengthen the Sample.
            before = len(conversation.prefix) - len(world)
            num_recorded = max((session.max_tokens or 0) - before, 0)
            tokens = TurnTokens(_int32(world[:num_recorded]), _empty_completion())
            return Act(Message("assistant"), tokens, restart)
        prompt_crc32 = zlib.crc32(array("i", conversation.prefix))
        sampling = self.sampling(len(conversation.prefix), tools, session)
        if sampling.return_routed_experts is not None:
            # Earlier turns have all but the experts of the token that was sampled last.
            start = max(len(conversation.prefix) - len(world) - 1, 0)
            sampling = replace(sampling, routed_experts_start_len=start)
        completion = await self._sampled(turn, sampling, session.id)
        sampled: list[int] = completion.token_ids.tolist()
        message = await self._renderer.parse(sampled, tools, prompt_ids=conversation.prefix)
        conversation.add_turn(sampled, message)
        return Act(message, TurnTokens(_int32(world), completion, prompt_crc32, turn.privileged), restart)

    @property
    def has_begun(self) -> bool:
        """Whether its first prompt is rendered."""
        return bool(self._conversation.prefix)

    async def prompt(
        self, observation: Observation, tools: Sequence[ToolSchema], session: Session
    ) -> TurnTokens:
        """The first turn without any sampled token, where it was given up: its prompt, up to the limit of the
        trajectory."""
        conversation, turn = self._conversation, self._turn
        if not self.has_begun and turn is not None:
            conversation.add_rendered(observation, tools, turn.world, turn.restart)
        elif not self.has_begun:
            await self._begun(observation, tools)
        return TurnTokens(_int32(conversation.prefix[: session.max_tokens]), _empty_completion())

    @property
    def tokenizer(self) -> Tokenizer:
        """That of its renderer."""
        return self._plain.tokenizer

    async def render(self, observation: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """A first prompt; the agent's own conversation stays as it is."""
        return await self._renderer.render(observation, tools)

    async def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """What follows a prefix; the agent's own conversation stays as it is."""
        return await self._renderer.extend(seen, observation, tools)

    async def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """A sampled turn as a message."""
        return await self._renderer.parse(ids, tools, prompt_ids=prompt_ids)

    def sampling(self, num_used: int, tools: Sequence[ToolSchema], session: Session) -> Sampling:
        """How it samples a turn after `num_used` tokens.

        Raises:
            ConfigError: neither the episode nor the settings limit its tokens.
        """
        stops = self._plain.stops(tools)
        return Sampling(
            max_new_tokens=self._num_free_tokens(session, num_used),
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            stop=stops.strings,
            stop_token_ids=stops.token_ids,
            seed=session.seed,
            return_kept_ids=self._settings.return_kept_ids,
            return_routed_experts=self._settings.return_routed_experts,
        )

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: Session, watch: Watch | None = None
    ) -> Completion:
        """What the policy samples after these tokens. Where the agent was stopped, nothing, and aborted."""
        if self._is_stopping:
            return _empty_completion(Finish.ABORT)
        policy = self._policy
        with requesting(), self._sessions.free(session.id) as name:
            if watch is not None and isinstance(policy, StreamingPolicy):
                with policy.watched(name, watch):
                    return await policy.generate(prompt_ids, sampling, session=name)
            return await policy.generate(prompt_ids, sampling, session=name)

    async def close(self, session_id: str) -> None:
        """Free the engine's cache for this episode."""
        for name in {session_id, *self._sessions.names}:
            await self._policy.close_session(name)

    async def stop(self, session_id: str) -> None:
        """Stop at the next token: `act` raises TurnStoppedError, unless its turn was complete."""
        self._is_stopping = True
        await self.close(session_id)

    def save_state(self, tools: Sequence[ToolSchema]) -> JSON:
        """The tools of its last turn, where others are on offer now, and a turn that was stopped."""
        before = tuple(self._conversation.tools)
        state = _State(None if before == tuple(tools) else before, self._turn)
        return lines.as_json(_states(), state)

    def load_state(
        self, state: JSON, trajectories: Sequence[SavedTurns], tools: Sequence[ToolSchema]
    ) -> None:
        """Be as far as the agent that saved this: its conversation is that of its turns, token by token.

        Raises:
            ValueError: it is no state of such an agent.
        """
        saved, conversation = _states().validate_python(state), self._conversation
        before = tools if saved.tools is None else saved.tools
        for trajectory in trajectories:
            restart = trajectory.reason
            for turn in trajectory.turns:
                if turn.tokens is None:
                    raise ValueError("a turn of this agent has tokens")
                conversation.add_rendered(turn.observation, before, turn.tokens.world_ids.tolist(), restart)
                conversation.add_turn(turn.tokens.completion.token_ids.tolist(), turn.action)
                restart = None
        self._turn = saved.turn

    async def _begun(self, observation: Observation, tools: Sequence[ToolSchema]) -> _Turn:
        """Append the observation; where it begins a trajectory, render its prompt for the teacher, too."""
        conversation, text = self._conversation, self.privileged_text
        is_first = not conversation.messages
        world, restart = await conversation.add_observation(observation, tools)
        if text is None or not (is_first or restart is not None):
            return _Turn(tuple(world), restart)
        prompt = privileged_prompt(conversation.messages, text)
        return _Turn(tuple(world), restart, None, tuple(await self._renderer.render(prompt, tools)))

    async def _sampled(self, turn: _Turn, sampling: Sampling, session_id: str) -> Completion:
        """The completion of a turn, of which some tokens may have been sampled before."""
        if not self._is_stopping:
            if turn.sampled is not None:
                sampling = replace(sampling, continues=turn.sampled)
            with requesting():
                prefix = self._conversation.prefix
                completion = await self._policy.generate(prefix, sampling, session=session_id)
            if not (self._is_stopping and completion.finish is Finish.ABORT):
                self._turn = None
                return completion
            turn = turn._replace(sampled=completion if len(completion.token_ids) else None)
        self._turn = turn
        raise TurnStoppedError(session_id)

    def _num_free_tokens(self, session: Session, num_used: int) -> int:
        bounds = [] if self._settings.max_response_len is None else [self._settings.max_response_len]
        if session.max_tokens is not None:
            bounds.append(session.max_tokens - num_used)
        if not bounds:
            raise ConfigError("the environment sets no limit of tokens; set rollout_max_context_len.")
        return min(bounds)


class DeadlineAgent:
    """An agent whose last turn ends at a deadline, however long the policy would go on.

    The turn that is then under way, and each later one, is empty, and its finish is `length`: `play` ends
    the episode as a truncated one, with all turns before it. Tokens that were sampled for that turn are lost.
    Of a first turn the prompt is kept: a trajectory begins with a token of the world.

    deadline: that of all agents of a group.
    """

    def __init__(self, agent: Agent, deadline: SharedDeadline) -> None:
        self._agent, self._deadline = agent, deadline

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The agent's turn, or an empty one at the deadline.

        Waits for: the agent. Unblocked by: its turn or the deadline.
        """
        limit, agent = asyncio.timeout(None), self._agent
        is_first = isinstance(agent, TokenAgent) and not agent.has_begun
        try:
            async with limit:
                with self._deadline.ends(limit):
                    return await agent.act(observation, tools=tools, session=session)
        except TimeoutError:
            if not limit.expired():
                raise
        if is_first and isinstance(agent, TokenAgent):
            return Act(Message("assistant"), await agent.prompt(observation, tools, session))
        return Act(Message("assistant"), TurnTokens(_int32([]), _empty_completion()))

    async def close(self, session_id: str) -> None:
        """Close the agent."""
        await self._agent.close(session_id)


class _ResumableDeadlineAgent(DeadlineAgent):
    """A `DeadlineAgent` that stops and goes on as its agent does."""

    def __init__(self, agent: Agent, deadline: SharedDeadline, resumable: ResumableAgent) -> None:
        super().__init__(agent, deadline)
        self.stop, self.save_state, self.load_state = (
            resumable.stop,
            resumable.save_state,
            resumable.load_state,
        )


class _TokenDeadlineAgent(_ResumableDeadlineAgent):
    """A `DeadlineAgent` that can also be asked for tokens: at the deadline it samples none."""

    def __init__(self, agent: TokenAgent, deadline: SharedDeadline) -> None:
        super().__init__(agent, deadline, agent)
        self._source = agent
        self.render, self.sampling = agent.render, agent.sampling
        self.extend, self.parse = agent.extend, agent.parse

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the agent."""
        return self._source.tokenizer

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: Session, watch: Watch | None = None
    ) -> Completion:
        """What the agent samples, or nothing at the deadline."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                with self._deadline.ends(limit):
                    return await self._source.sample(prompt_ids, sampling, session, watch)
        except TimeoutError:
            if not limit.expired():
                raise
        return _empty_completion()


def with_deadline(agent: Agent, deadline: SharedDeadline) -> Agent:
    """The agent with the deadline of `DeadlineAgent`; a `ResumableAgent` stays one, a TokenAgent also a
    `TokenSource`."""
    if isinstance(agent, TokenAgent):
        return _TokenDeadlineAgent(agent, deadline)
    if isinstance(agent, ResumableAgent):
        return _ResumableDeadlineAgent(agent, deadline, agent)
    return DeadlineAgent(agent, deadline)


def _int32(ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(ids, dtype=np.int32)


def _empty_completion(finish: Finish = Finish.LENGTH) -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(empty, np.zeros(0, dtype=np.float32), empty.copy(), finish)
