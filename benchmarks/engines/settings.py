"""The loads of the benchmark of engines: frozen, so that figures of different days are comparable."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GenerationWorkload:
    """Requests that are sent together. Ranges are inclusive; lengths in tokens.

    turns: requests of each session, with `world` new tokens after each completion.
    """

    name: str
    concurrency: int = 32
    prompt: tuple[int, int] = (32, 32)
    new: tuple[int, int] = (64, 64)
    temperature: float = 1.0
    turns: int = 1
    world: int = 16
    is_target: bool = False

    @property
    def context_len(self) -> int:
        """The longest prefix that any session reaches."""
        return self.prompt[1] + self.turns * self.new[1] + (self.turns - 1) * self.world


RAGGED = GenerationWorkload("ragged", prompt=(8, 56), new=(16, 112), is_target=True)
GREEDY = GenerationWorkload("equal, greedy", temperature=0.0)
TURNS = GenerationWorkload("four short turns", new=(10, 10), turns=4)
ALONE = GenerationWorkload("one request alone", concurrency=1)
"""An adverse case: with a batch of one, batching gains nothing."""

CONCURRENT = tuple(
    GenerationWorkload(
        f"{number} at once{', greedy' if greedy else ''}",
        concurrency=number,
        prompt=(24, 24),
        temperature=float(not greedy),
        is_target=True,
    )
    for greedy in (False, True)
    for number in (32, 128, 256, 512)
)
"""Frozen: 64 new tokens after prompts of 24, up to the quickstart's number of episodes in flight."""

TINY_WORKLOADS = (
    *CONCURRENT,
    GenerationWorkload("equal", new=(192, 192), is_target=True),
    GenerationWorkload("equal, 64 tokens"),
    RAGGED,
    GREEDY,
    TURNS,
    ALONE,
)
"""Frozen. `equal` fills the context of the quickstart's episodes."""

SMALL_WORKLOADS = (GenerationWorkload("equal", is_target=True), RAGGED, GREEDY, TURNS, ALONE)
"""Frozen."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """A model by its name, with its dtype. target: the ratio to reach in the workloads that are targets."""

    model: str
    dtype: str
    workloads: tuple[GenerationWorkload, ...]
    target: float


MODELS = (
    ModelUnderTest("tiny", "float32", TINY_WORKLOADS, 2.0),
    # Without a decoder of its own: by transformers' code. Here ragged requests are the adverse case.
    ModelUnderTest("tiny Gemma 2", "float32", (GenerationWorkload("equal"), RAGGED, TURNS, ALONE), 1.0),
    ModelUnderTest("135M", "bfloat16", SMALL_WORKLOADS, 1.8),
    ModelUnderTest("135M", "float32", SMALL_WORKLOADS[:2], 1.8),
)


@dataclass(frozen=True, slots=True)
class GenerationLoad:
    """Requests of forced lengths, `concurrency` at a time (counts); lengths in tokens."""

    concurrency: int
    requests: int
    prompt: int = 32
    new: int = 128


SINGLE = GenerationLoad(1, 4)
"""An adverse case: no other request shares the cost of the layers between a request and the model."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Requests of this package's client and of a plain httpx2 client; lengths in tokens.

    requests: to the stub server, and (real_requests) to SGLang, in one repeat; there are `concurrency`
    different prompts. cache: the size of SGLang's cache, which holds all of them (tokens).
    cpu_ms, ratio: the targets: CPU time of a request (milliseconds), throughput over the plain client's.
    """

    concurrency: int = 64
    requests: int = 2048
    real_requests: int = 128
    prompt: int = 256
    new: int = 32
    cache: int = 40_000
    cpu_ms: float = 1.5
    ratio: float = 0.95


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Concurrent sessions on two servers (counts); lengths in tokens.

    cache: the size of each server's cache: below the total of all sessions, above that of half of them.
    """

    sessions: int = 32
    turns: int = 8
    world: int = 64
    new: int = 8
    cache: int = 12_000
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class UpdateLoad:
    """Updates of a model. changed: the share of values in which neighbouring versions differ.

    bucket_bytes: the largest bucket, as the trainer sends them.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    transports: tuple[str, ...] = ("tensor", "distributed", "disk", "delta")
    changed: float = 0.01
    bucket_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class KillLoad:
    """A steady load on two servers, of which one is killed (counts; lengths in tokens).

    steady: the number of completed requests before the kill, and again after the server's recovery.
    within_s: the benchmark fails where the recovery takes longer (seconds).
    """

    concurrency: int = 8
    prompt: int = 32
    new: int = 256
    steady: int = 16
    within_s: float = 240.0
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All loads. repeats: of embedded, throughput, client and weights; the others have their own."""

    embedded: tuple[ModelUnderTest, ...] = MODELS
    loads: tuple[GenerationLoad, ...] = (
        SINGLE,
        GenerationLoad(8, 8),
        GenerationLoad(32, 32),
        GenerationLoad(64, 64),
    )
    client: ClientLoad = field(default_factory=ClientLoad)
    turns: SessionLoad = field(default_factory=SessionLoad)
    weights: UpdateLoad = field(default_factory=UpdateLoad)
    killed: KillLoad = field(default_factory=KillLoad)
    repeats: int = 5


SETTINGS = EngineSettings()
"""Frozen."""
