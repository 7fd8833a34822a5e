"""The interfaces between the parts of the package. A class with these methods is such a part, without a base.

A tool is a typed callable (`agentrl.tools.Tool`) and needs no protocol. Two interfaces are next to their
types: `agentrl.algorithms.advantages.AdvantageEstimator` and `agentrl.losses.Loss`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeAlias

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
    """

    id: str
    seed: int
    max_tokens: int | None


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    max_new_tokens: at most (count). temperature: 0 = greedy. top_p: 1 = off. top_k: 0 = off.
    stop: strings that end a turn. stop_token_ids: tokens that do. seed: None = any. continues: what a stopped
    request has sampled: the completion begins with it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    continues: Completion | None = None


class Policy(Protocol):
    """Samples tokens."""

    @property
    def version(self) -> int:
        """The version of the weights that serve now."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the complete prefix `prompt_ids`.

        Cancelling the call aborts the request and frees its cache.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens can never fit.
        """

    async def close_session(self, session: str) -> None:
        """Free the cache of a session; unknown sessions are fine."""


class TensorSpec(NamedTuple):
    """A tensor by its Hugging Face name. dtype: as torch prints it, without `torch.`."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Bucket(NamedTuple):
    """Some complete tensors, one after another. data: uint8 [sum of their bytes]."""

    tensors: tuple[TensorSpec, ...]
    data: npt.NDArray[np.uint8]


class WeightTransaction(Protocol):
    """New weights that arrive. Leaving without commit keeps the old version serving."""

    async def put(self, bucket: Bucket) -> None:
        """Stage some tensors."""

    async def commit(self, checksum: int) -> None:
        """Pause, swap, compare the checksum of what was loaded, set the version, resume.

        Raises:
            EngineError: tensors are missing or the checksum differs; the old version serves on.
        """


class WeightSink(Protocol):
    """Takes new weights."""

    def begin(
        self, manifest: Sequence[TensorSpec], version: int
    ) -> AbstractAsyncContextManager[WeightTransaction]:
        """Begin `version`; `manifest` lists every tensor that will be put."""


class RunningPolicy(Policy, Protocol):
    """A policy whose requests can be stopped, and which holds resources until it is closed."""

    async def abort(self) -> None:
        """End every running request with what it has so far, finish = abort."""

    async def close(self) -> None:
        """Abort, then free everything."""


MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""A part of an engine's memory: its weights, or the cache of keys and values. The words are SGLang's."""


class Engine(RunningPolicy, Protocol):
    """A running policy that takes new weights."""

    @property
    def sink(self) -> WeightSink:
        """What takes its new weights."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of unusual events of requests and servers so far, by name."""

    async def release_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Free this memory until `resume_memory`, and hold all requests meanwhile.

        The result is what the system got back (bytes); None: unknown. Running requests stop between two
        tokens and go on afterwards, new ones wait, with their clocks. Send weights before resuming the cache.
        """

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate released memory again; requests go on when all of it is there, and weights have arrived.

        Raises:
            EngineError: the cache is asked for, and no weights were sent since theirs were released.
        """


class StepReport(NamedTuple):
    """The report of one optimizer step: metrics by name (train/...), and its tokens (count)."""

    metrics: Mapping[str, float]
    num_tokens: int


class PublishReport(NamedTuple):
    """The report of one delivery of weights: its version, its size (bytes), its wall time (seconds)."""

    version: int
    num_bytes: int
    seconds: float


class Trainer(Protocol):
    """Updates weights by samples and their credit.

    None of its calls blocks the event loop: meanwhile replies arrive, tools run, deadlines hold. A call that
    has begun goes on to its end; a cancellation takes effect after it.
    """

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token in each role (nats), at each sample's temperature, and the critic's values.

        `old` are those of the current weights; where it is not asked for, those of the engine.
        """

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step over the whole batch, however it is split into micro-batches."""

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights to `target` as `version`."""

    async def onload(self) -> int | None:
        """Have on the device all that a step needs, until `offload`; other calls onload what they need.

        The result is the device's free memory before, on the rank with least (bytes); None: it is the CPU.
        """

    async def offload(self) -> int:
        """Free the memory that is needed by a step only; returns what the device got back (bytes)."""

    async def save(self, directory: str) -> None:
        """Write a Hugging Face model directory, atomically."""

    async def save_state(self, directory: str) -> Awaitable[None]:
        """Copy weights, optimizers and steps; what is returned ends when the copy is a directory, atomically.

        Training may go on meanwhile.
        """

    async def load_state(self, directory: str) -> None:
        """Go on from what a trainer with the same settings has saved."""

    async def close(self) -> None:
        """End all that it has started. Nothing may be called afterwards."""
