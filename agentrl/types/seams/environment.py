"""Environments, the agents that act in them, and the renderers between messages and tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from agentrl.types import (
    JSON,
    Completion,
    Finish,
    JointStep,
    Limits,
    Message,
    Observation,
    Restart,
    Step,
    Task,
    ToolStats,
    TurnTokens,
    Usage,
)
from agentrl.types.seams.engine import Sampling, Watch


class ToolSchema(NamedTuple):
    """The description of a tool for a model.

    description: one sentence. parameters: JSON Schema of an object, whose properties are the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, JSON]


class Environment(Protocol):
    """The common part of environments of one agent and of several.

    An instance is reset once, stepped until its episode ends, closed once.
    """

    id: str
    limits: Limits

    @property
    def possible_agents(self) -> Sequence[str]:
        """The names of all agents that may act."""

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer; read after reset."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of events so far, by name (tool_calls, rejected_calls, ...)."""

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """Statistics of the calls of each tool so far."""

    async def close(self) -> None:
        """Release all resources of the episode."""


class SingleAgentEnvironment(Environment, Protocol):
    """One episode of an environment with one agent."""

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin `task`. The observation is the complete first prompt."""

    async def step(self, action: Message) -> Step:
        """Answer one assistant message; the observation holds only new messages."""


class MultiAgentEnvironment(Environment, Protocol):
    """One episode of an environment with several agents, who act in turns or at the same time."""

    @property
    def acting(self) -> Collection[str]:
        """The agents whose turn it is; read after reset and after each step."""

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """The tools on offer to one agent; read after reset."""

    async def reset(self, task: Task, *, seed: int) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
        """Begin `task`. The observations hold the complete first prompt of every agent that acts now."""

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Answer one message of each agent whose turn it was; simultaneous moves are one step."""


@dataclass(frozen=True, slots=True)
class Session:
    """The part of an episode that one agent acts in.

    id: its name for the engine, so that all of its turns find the same cache.
    seed: of the sampling of this turn.
    max_tokens: most tokens of one trajectory, whoever their author is (count); None = no limit.
    response_format: the form of this turn, as OpenAI's chat requests name it; None = any. An agent whose
        engine cannot hold a form ignores it.
    """

    id: str
    seed: int
    max_tokens: int | None
    response_format: JSON = None


class Act(NamedTuple):
    """An action of an agent.

    tokens: of the turn; None for agents without tokens (scripts, people, chat endpoints).
    restart: why the turn does not continue the previous prefix: its world_ids are then the complete new
        prompt. None = it does.
    finish: why a turn without tokens ended; that of a turn with tokens is in its completion.
    counts: of events of the turn, by name; summed into `Episode.counts`.
    usage: as a chat endpoint counts it; summed into `Episode.usage`.
    """

    message: Message
    tokens: TurnTokens | None
    restart: Restart | None = None
    finish: Finish = Finish.STOP
    counts: Mapping[str, int] = MappingProxyType({})
    usage: Usage | None = None


class Agent(Protocol):
    """Plays one episode."""

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """Answer an observation: the new messages, on the first turn the complete prompt."""

    async def close(self, session_id: str) -> None:
        """Release what belongs to the episode, which has ended in some way."""


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. add_special_tokens: whether it begins as the model expects every text to."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]:
        """The text of tokens."""


@runtime_checkable
class TokenSource(Protocol):
    """What an agent has where its policy can be asked for tokens after any others."""

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the policy."""

    async def render(self, observation: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """A first prompt, as the agent would begin an episode with it."""

    async def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The tokens of an observation after a turn, as of a Renderer; or why it cannot."""

    async def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """A sampled turn, as of a Renderer."""

    def sampling(self, num_used: int, tools: Sequence[ToolSchema], session: Session) -> Sampling:
        """How it samples a turn after `num_used` tokens; `max_new_tokens` is what the limits leave."""

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: Session, watch: Watch | None = None
    ) -> Completion:
        """What the policy samples after these tokens; empty at a deadline.

        watch: sees them before, where the policy shows them.
        """


class Stops(NamedTuple):
    """What ends a turn: strings that this tokenizer splits, and single tokens."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]


class Seen(NamedTuple):
    """One unbroken prefix of a model: its messages, the tools on offer, and its tokens.

    prompt_ids: all tokens before its last turn. completion_ids: its last turn, as sampled.
    """

    messages: Observation
    tools: Sequence[ToolSchema]
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


class Renderer(Protocol):
    """From messages to tokens and back, for one tokenizer and one dialect.

    The prefix law: render(), then any sequence of sampled ids and extend(), concatenated,
    is exactly what the model sees; nothing sampled is ever encoded a second time. Where the dialect
    would have to take something back (tools, reasoning), extend() says so, and the caller begins
    a new prefix with render().
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """What ends a turn."""

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The first prompt, up to where the policy begins to write."""

    def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The tokens of an observation after a turn, up to where the policy writes again.

        A `Restart` where the prefix cannot be extended: why.
        """

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Read a sampled turn. Never raises: a malformed call is a ToolCall with an error.

        prompt_ids: what stood before it; some formats begin a turn's reasoning there.
        """

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens that a policy would have sampled for `action`, the end included."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any tokens, special ones included."""


class EpisodeRenderer(Protocol):
    """A Renderer for running episodes: no text, whoever wrote it, holds the event loop for long."""

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """What ends a turn."""

    async def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The first prompt, as of a Renderer."""

    async def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The tokens of an observation after a turn, as of a Renderer; or why it cannot."""

    async def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """A sampled turn, as of a Renderer. One that cannot be parsed in time is a malformed call."""
