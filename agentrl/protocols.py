"""Every seam, on one page. A room offers one of these; nobody needs to know which room it was.

The tool seam is `agentrl.tools.Tool`, a typed callable, and needs no protocol. Two seams speak in words of
their rooms and stand there: `agentrl.algorithms.advantages.AdvantageEstimator` and `agentrl.losses.Loss`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from agentrl.types import (
    JSON,
    Completion,
    Finish,
    JointStep,
    Limits,
    Message,
    Observation,
    Restart,
    Sample,
    ScoreRole,
    Scores,
    Step,
    Task,
    ToolStats,
    TrainBatch,
    TurnTokens,
    Usage,
)


class ToolSchema(NamedTuple):
    """What a model is told about a tool: its name, one sentence, and JSON Schema parameters."""

    name: str
    description: str
    parameters: Mapping[str, JSON]


class Environment(Protocol):
    """What environments of one and of several agents share.

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
        """How often things happened so far (tool_calls, rejected_calls, ...)."""

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """What happened to the calls of each tool so far."""

    async def close(self) -> None:
        """Let go of everything the episode held."""


class SingleAgentEnvironment(Environment, Protocol):
    """One episode of an environment with one agent."""

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin `task`. The observation is the whole first prompt."""

    async def step(self, action: Message) -> Step:
        """Answer one assistant message; the observation holds only what is new."""


class MultiAgentEnvironment(Environment, Protocol):
    """One episode of an environment with several agents, who act in turns or at the same time."""

    @property
    def acting(self) -> Collection[str]:
        """The agents whose turn it is; read after reset and after each step."""

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """The tools on offer to one agent; read after reset."""

    async def reset(self, task: Task, *, seed: int) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
        """Begin `task`. The observations hold the whole first prompt of every agent that acts now."""

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Answer one message of each agent whose turn it was; simultaneous moves are one step."""


@dataclass(frozen=True, slots=True)
class Session:
    """What an agent needs to know of the episode it acts in.

    id: names its part of the episode to the engine, so that its turns meet the same cache.
    seed: seeds the sampling of this turn.
    max_tokens: how many tokens of any author one trajectory may hold; None = no limit.
    """

    id: str
    seed: int
    max_tokens: int | None


class Act(NamedTuple):
    """An agent's move. tokens is None for agents that have none (scripts, people, remote APIs).

    restart: why the agent did not go on from what it had seen, but from a prompt that its world_ids
    hold whole; None = it went on.
    finish: why a turn without tokens ended; where there are tokens, their completion says it.
    counts: what happened on the way to it, by name; summed into `Episode.counts`.
    usage: what a chat endpoint counted; summed into `Episode.usage`.
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
        """Answer what the world just showed (on the first turn: the whole prompt)."""

    async def close(self, session_id: str) -> None:
        """The episode is over, however it ended: free what belongs to it."""


class Stops(NamedTuple):
    """What ends a turn: strings that this tokenizer splits, and single tokens."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]


class Seen(NamedTuple):
    """What a model has seen and said so far in one unbroken prefix.

    prompt_ids: everything before its last turn. completion_ids: its last turn, as sampled.
    """

    messages: Observation
    tools: Sequence[ToolSchema]
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


class Renderer(Protocol):
    """Words to tokens and back, for one tokenizer and one dialect.

    The prefix law: render(), then any sequence of sampled ids and extend(), concatenated,
    is exactly what the model sees; nothing sampled is ever encoded a second time. Where the dialect
    would have to take something back (tools, reasoning), extend() says so, and the caller begins
    a new prefix with render().
    """

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """What ends a turn."""

    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The first prompt, up to where the policy begins to write."""

    def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """What the world adds after a turn, up to where the policy writes again; or why it cannot."""

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Read a sampled turn. Never raises: a malformed call is a ToolCall with an error.

        prompt_ids: what stood before it; some formats begin a turn's reasoning there.
        """

    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens a policy would have sampled to say `action`, the end included."""

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
        """What the world adds after a turn, as of a Renderer; or why it cannot."""

    async def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """A sampled turn, as of a Renderer. One that cannot be parsed in time is a malformed call."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. temperature 0 = greedy; top_p 1 and top_k 0 = off; seed None = any."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class Policy(Protocol):
    """Something that samples tokens."""

    @property
    def version(self) -> int:
        """The version of the weights that serve now."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the whole prefix `prompt_ids`.

        Cancelling the call aborts the request and frees its room.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens can never fit.
        """

    async def close_session(self, session: str) -> None:
        """Forget the cache kept for a session; unknown sessions are fine."""


class TensorSpec(NamedTuple):
    """A tensor by its Hugging Face name. dtype as torch prints it, without `torch.`."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Bucket(NamedTuple):
    """Some whole tensors, laid end to end: data is uint8 [sum of their bytes]."""

    tensors: tuple[TensorSpec, ...]
    data: npt.NDArray[np.uint8]


class WeightTransaction(Protocol):
    """Weights on their way in. Leaving without commit keeps the old version serving."""

    async def put(self, bucket: Bucket) -> None:
        """Stage some tensors."""

    async def commit(self, checksum: int) -> None:
        """Pause, swap, compare the checksum of what was loaded, set the version, resume.

        Raises:
            EngineError: tensors are missing or the checksum differs; the old version serves on.
        """


class WeightSink(Protocol):
    """Where new weights go."""

    def begin(
        self, manifest: Sequence[TensorSpec], version: int
    ) -> AbstractAsyncContextManager[WeightTransaction]:
        """Start sending `version`; `manifest` lists every tensor that will come."""


class RunningPolicy(Policy, Protocol):
    """A policy whose requests can be stopped, and that holds something until it is closed."""

    async def abort(self) -> None:
        """End every running request with what it has so far, finish = abort."""

    async def close(self) -> None:
        """Abort, then free everything."""


class Engine(RunningPolicy, Protocol):
    """A policy that can also be fed with weights."""

    @property
    def sink(self) -> WeightSink:
        """Where this engine takes new weights."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How often something out of the ordinary happened to requests and servers so far, by name."""


class StepReport(NamedTuple):
    """What one optimizer step did: metrics by name (train/...), and the tokens it went through."""

    metrics: Mapping[str, float]
    num_tokens: int


class PublishReport(NamedTuple):
    """One delivery of weights."""

    version: int
    num_bytes: int
    seconds: float


class Trainer(Protocol):
    """Turns samples and credit into better weights.

    None of its calls blocks the event loop: meanwhile replies arrive, tools run, deadlines hold. A call that
    has begun goes on to its end; a cancellation takes effect after it.
    """

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token in each role, at each sample's temperature, and the critic's values.

        `old` are those of the current weights; where it is not asked for, those of the engine.
        """

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step over the whole batch, however it is split into micro-batches."""

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights to `target` as `version`."""

    async def save(self, directory: str) -> None:
        """Write a Hugging Face model directory, atomically."""

    async def save_state(self, directory: str) -> Awaitable[None]:
        """Copy weights, optimizers and steps; what is returned ends when the copy is a directory, atomically.

        Training may go on meanwhile.
        """

    async def load_state(self, directory: str) -> None:
        """Go on from what a trainer with the same settings has saved."""

    async def close(self) -> None:
        """End what it has started; it is of no use any more."""
