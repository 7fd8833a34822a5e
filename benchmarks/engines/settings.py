"""What the benchmark of the engines runs: frozen, so that figures of different days can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of forced lengths, so many at a time (counts); lengths in tokens."""

    concurrency: int
    requests: int
    prompt: int = 32
    new: int = 128


ALONE = Load(1, 4)
"""This one hurts: a request alone pays for every layer between it and the model, and shares with nobody."""


@dataclass(frozen=True, slots=True)
class Client:
    """Requests that our client sends, and a bare client after it; lengths in tokens.

    requests: to the server that costs little, and (real_requests) to SGLang, in one repeat; there are as many
    prompts as run at a time. cache: how many tokens SGLang keeps: all of them.
    cpu_ms, ratio: the targets: CPU time of a request (milliseconds), throughput over the bare client's.
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
class Turns:
    """Sessions that all play at once, on two servers (counts); lengths in tokens.

    cache: how many tokens each server keeps: less than all sessions come to, more than half of them do.
    """

    sessions: int = 32
    turns: int = 8
    world: int = 64
    new: int = 8
    cache: int = 12_000
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Weights:
    """Updates of a model. changed: the share of values in which neighbouring versions differ.

    bucket_bytes: at most so many at once, as the trainer sends them.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    transports: tuple[str, ...] = ("tensor", "distributed", "disk", "delta")
    changed: float = 0.01
    bucket_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Killed:
    """Requests that never cease, at two servers, of which one is killed (counts; lengths in tokens).

    steady: how many requests are answered before it strikes, and again after the server is back.
    within_s: the benchmark fails where the server takes longer to come back (seconds).
    """

    concurrency: int = 8
    prompt: int = 32
    new: int = 256
    steady: int = 16
    within_s: float = 240.0
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it. repeats: of throughput, client and weights; the others have their own."""

    loads: tuple[Load, ...] = (ALONE, Load(8, 8), Load(32, 32), Load(64, 64))
    client: Client = field(default_factory=Client)
    turns: Turns = field(default_factory=Turns)
    weights: Weights = field(default_factory=Weights)
    killed: Killed = field(default_factory=Killed)
    repeats: int = 5


SETTINGS = Settings()
"""Frozen."""
