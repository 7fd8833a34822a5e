"""The nouns: frozen, complete at birth, checked once here and trusted everywhere else.

Shape suffixes: T tokens of one sequence, G siblings of one group.
Alignment, once for all: `logprobs[t] = log p(token[t] | tokens[<t])` and `loss_mask[0]` is False.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeAliasType

# A named alias: pydantic cannot follow an implicitly recursive one.
JSON = TypeAliasType("JSON", "str | int | float | bool | list[JSON] | dict[str, JSON] | None")
Role = Literal["system", "user", "assistant", "tool"]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

NO_VERSION = -1
"""The policy version of a token that no policy wrote."""


class Author(IntEnum):
    """Who wrote a token: a fact, whatever the loss mask chooses to do with it."""

    WORLD = 0
    POLICY = 1
    DEMO = 2


class Finish(StrEnum):
    """Why the engine stopped: a stop string or token, the token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Ending(StrEnum):
    """How an episode ended: by the world, by a limit, by us, or by a failure."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. Malformed calls are representable: then `error` says why.

    name: the tool's name, empty where the model named none.
    arguments: parsed arguments, or None when they could not be read.
    raw: the text the model wrote.
    """

    name: str
    arguments: Mapping[str, JSON] | None
    raw: str = ""
    id: str = ""
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.arguments is None) == (self.error is None):
            raise ValueError("a ToolCall has either arguments or an error, exactly one of them")


@dataclass(frozen=True, slots=True)
class Message:
    """One message. An assistant message without tool calls is a final answer."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, not role {self.role!r}")


Observation: TypeAlias = tuple[Message, ...]


def call(name: str, /, **arguments: JSON) -> Message:
    """The assistant message that calls one tool, as a scripted agent writes it."""
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def say(text: str) -> Message:
    """The assistant message that gives a final answer."""
    return Message("assistant", text)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. `answer` and `metadata` are for the world, never shown to the model."""

    id: str
    prompt: Observation
    answer: str | None = None
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    split: str = "train"

    @classmethod
    def ask(cls, id: str, question: str, answer: str | None = None, **metadata: JSON) -> Task:
        """A task whose whole prompt is one question."""
        return cls(id, (Message("user", question),), answer, metadata)


class Step(NamedTuple):
    """Gymnasium's five values. reward None = not scored, 0.0 = scored and worth nothing."""

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Mapping[str, JSON]

    @classmethod
    def going(cls, *observation: Message, reward: float | None = None, **info: JSON) -> Step:
        """The episode goes on."""
        return cls(observation, reward, False, False, info)

    @classmethod
    def finished(cls, *observation: Message, reward: float | None, **info: JSON) -> Step:
        """The world ended: there is nothing left to do."""
        return cls(observation, reward, True, False, info)

    @classmethod
    def cut(cls, *observation: Message, reward: float | None = None, **info: JSON) -> Step:
        """A limit of the world's own ended it."""
        return cls(observation, reward, False, True, info)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may use. Seconds are wall time; None = no limit of this kind.

    max_turns: assistant messages. max_tokens: prompt, world and policy tokens together.

    Raises:
        ValueError: a limit that leaves no room for anything.
    """

    max_turns: int = 8
    max_tokens: int | None = 2048
    reset_timeout_s: float | None = 60.0
    tool_timeout_s: float | None = 30.0
    step_timeout_s: float | None = 60.0
    reward_timeout_s: float | None = 30.0
    episode_timeout_s: float | None = 600.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not value > 0:
                raise ValueError(f"{limit.name} must be above 0, got {value}; None means no limit")


def _freeze(array: npt.NDArray[np.generic]) -> None:
    array.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the engine sampled: T tokens, each with its logprob and its policy version.

    The stop token, or the tokens of the stop string, are part of it. logprobs are after
    temperature and before top-p and top-k.
    matched: the stop string, or the stop token id, that ended it.
    cached_tokens: prompt tokens that were not computed again.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish: Finish
    matched: str | int | None = None
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        shapes = {self.token_ids.shape, self.logprobs.shape, self.versions.shape}
        if len(shapes) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"token_ids, logprobs and versions must share one length, got {shapes}")
        for array in (self.token_ids, self.logprobs, self.versions):
            _freeze(array)


@dataclass(frozen=True, slots=True, eq=False)
class TurnTokens:
    """The tokens one turn added: the world's part, then what the policy sampled."""

    world_ids: IntArray
    completion: Completion

    def __post_init__(self) -> None:
        _freeze(self.world_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the world showed and what the agent did. tokens is None for agents without tokens."""

    observation: Observation
    action: Message
    tokens: TurnTokens | None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One unbroken prefix: the concatenation of its turns' tokens is what the model saw."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode failed: stage (reset, tool, step, reward, act, episode), kind, detail."""

    stage: str
    kind: str
    detail: str

    @property
    def name(self) -> str:
        """The key it is counted under, e.g. `tool_timeout`."""
        return f"{self.stage}_{self.kind}"


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """Only what happened. Scores live in Verdicts.

    step_rewards: one per turn that the world answered, in order.
    counts: how often things happened in the world (tool_calls, rejected_calls, ...).
    """

    id: str
    env_id: str
    task: Task
    seed: int
    limits: Limits
    trajectories: tuple[Trajectory, ...]
    step_rewards: tuple[float | None, ...]
    ending: Ending
    failure: Failure | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.ending is Ending.FAILED) != (self.failure is not None):
            raise ValueError("an episode carries a failure exactly when its ending is `failed`")

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, in order, over all trajectories."""
        return tuple(turn for trajectory in self.trajectories for turn in trajectory.turns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score of one episode. Scoring again writes a new Verdict, never a new Episode."""

    episode_id: str
    scorer: str
    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if not np.isfinite(self.total):
            raise ValueError(f"a verdict's total must be finite, got {self.total}")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One task, one seed: the siblings that played it and a verdict for each.

    start_version: the policy version that was serving when the group started.
    """

    id: str
    task: Task
    seed: int
    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]
    start_version: int = 0

    def __post_init__(self) -> None:
        if [e.id for e in self.episodes] != [v.episode_id for v in self.verdicts]:
            raise ValueError(f"group {self.id}: verdicts must stand in the order of the episodes")
        strangers = {e.id for e in self.episodes if e.task.id != self.task.id or e.seed != self.seed}
        if strangers:
            raise ValueError(f"group {self.id}: {strangers} played another task or seed")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory as arrays of one length T: all that a trainer needs to know.

    author: int8 [T], an Author each. loss_mask: bool [T], a choice inside it.
    logprobs: float32 [T], 0 where no policy wrote. versions: int32 [T], NO_VERSION there.
    temperature: what the policy sampled at; the trainer divides its logits by the same.

    Raises:
        ValueError: misaligned arrays, a trainable first token, a trainable world token,
            or a policy token without a logprob or a version.
    """

    token_ids: IntArray
    author: npt.NDArray[np.int8]
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperature: float
    rollout_id: str

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.author, self.loss_mask, self.logprobs, self.versions)
        if len({a.shape for a in arrays}) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"a Sample's arrays must share one length, got {[a.shape for a in arrays]}")
        if not len(self.token_ids) or self.loss_mask[0]:
            raise ValueError("a Sample needs a first token, and it is never trained on")
        if np.any(self.loss_mask & (self.author == Author.WORLD)):
            raise ValueError("the loss mask covers tokens that the world wrote")
        policy = self.author == Author.POLICY
        if np.any(policy != (self.versions != NO_VERSION)):
            raise ValueError("exactly the policy's tokens carry a version")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs[~policy] != 0):
            raise ValueError("every policy token needs a finite logprob, every other token has 0")
        for array in arrays:
            _freeze(array)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the trainer computed on samples, one float32 [T] array for each of them."""

    logprobs: tuple[FloatArray, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """Advantages and loss weights, one float32 [T] array for each sample.

    weights are made once for the whole optimizer step, so that no way of splitting the
    batch can change the gradient: loss = sum over all tokens of weight x term.
    """

    advantages: tuple[FloatArray, ...]
    weights: tuple[FloatArray, ...]

    def __post_init__(self) -> None:
        if [a.shape for a in self.advantages] != [w.shape for w in self.weights]:
            raise ValueError("advantages and weights must have the same shapes, sample by sample")


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Everything one optimizer step needs. `old` holds the behaviour policy's logprobs."""

    samples: tuple[Sample, ...]
    credit: Credit
    old: Scores

    def __post_init__(self) -> None:
        counts = (len(self.samples), len(self.credit.weights), len(self.old.logprobs))
        if len(set(counts)) != 1:
            raise ValueError(f"samples, credit and old logprobs must match one to one, got {counts}")

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the loss covers."""
        return int(sum(s.loss_mask.sum() for s in self.samples))
