"""What the driver and the embedded engine's process send each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, TypeAlias

from agentrl.errors import AgentRLError
from agentrl.types.seams import MemoryTag, Sampling, TensorSpec


class Open(NamedTuple):
    """Serve the model in a directory, after the previous engine is closed. seed: draw its weights first.

    threads: that torch computes with (count). dtype: by torch's name. The others are those of
    `EmbeddedEngine.from_pretrained`.
    """

    directory: str
    max_slots: int
    max_context_len: int | None
    deterministic: bool
    threads: int
    seed: int | None
    dtype: Literal["float32", "bfloat16"] = "float32"


class Generate(NamedTuple):
    """Sample a continuation of a prompt. is_watched: the tokens of its steps come before the answer."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    session: str
    is_watched: bool = False


class Cancel(NamedTuple):
    """Cancel the request of that number: its caller was cancelled."""

    number: int


class CloseSession(NamedTuple):
    """Drop a session's cache."""

    session: str


class Abort(NamedTuple):
    """End all requests with their tokens so far."""


class Begin(NamedTuple):
    """Begin an update of the weights."""

    manifest: Sequence[TensorSpec]
    version: int


class Put(NamedTuple):
    """A bucket of the update, in memory that the process `pid` has open as `descriptor`.

    The answer is whether the engine still uses that memory.
    """

    tensors: tuple[TensorSpec, ...]
    pid: int
    descriptor: int
    num_bytes: int


class Commit(NamedTuple):
    """Commit the update: all buckets were sent. The answer is how long the engine stood still (seconds)."""

    checksum: int


class EndUpdate(NamedTuple):
    """End the update, committed or not. Nobody waits for the answer."""


UpdateMessage: TypeAlias = Begin | Put | Commit | EndUpdate


class ReleaseMemory(NamedTuple):
    """Free memory, and hold all requests. The answer is how much the system got back (bytes)."""

    tags: Collection[MemoryTag]


class ResumeMemory(NamedTuple):
    """Allocate released memory again."""

    tags: Collection[MemoryTag]


class Close(NamedTuple):
    """Abort all requests, and free the engine."""


Message: TypeAlias = (
    Open | Generate | Cancel | CloseSession | Abort | UpdateMessage | ReleaseMemory | ResumeMemory | Close
)
Numbered: TypeAlias = tuple[int, Message]
"""A message, and the number of its answer."""


class Shown(NamedTuple):
    """Tokens that a request has sampled since the last ones that were shown. Its answer is still to come."""

    token_ids: tuple[int, ...]


class MessageAnswer(NamedTuple):
    """The answer to a message: a value, or an error."""

    number: int
    value: object = None
    error: AgentRLError | None = None
