"""The loads of the benchmark of other packages: frozen, so that figures of different days are comparable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AGENTRL = "agentrl"
VERIFIERS = "verifiers"
IN_PROCESS = "verifiers, in-process harness"


@dataclass(frozen=True, slots=True)
class Load:
    """Episodes of one size. concurrency: episodes at once (count). payload: characters of a tool's result.

    episodes: in one repeat, by side (count): more of a fast side. A side without them is not played.
    """

    concurrency: int
    episodes: Mapping[str, int]
    payload: int = 40


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """loads: by the name of their section. calls: of the tool in an episode, before the answer (count)."""

    loads: Mapping[str, Load] = field(
        default_factory=lambda: {
            "single": Load(1, {AGENTRL: 32, VERIFIERS: 2, IN_PROCESS: 16}),
            "few": Load(16, {AGENTRL: 128, VERIFIERS: 16, IN_PROCESS: 64}),
            "many": Load(64, {AGENTRL: 256, VERIFIERS: 64, IN_PROCESS: 128}),
            # A process for each of 256 episodes does not fit into the memory of a laptop.
            "most": Load(256, {AGENTRL: 256, IN_PROCESS: 256}),
            # The harness that verifiers ships cuts every result to 20,000 bytes.
            "long": Load(16, {AGENTRL: 32, IN_PROCESS: 32}, payload=200_000),
        }
    )
    calls: int = 3
    repeats: int = 5


SETTINGS = PeerSettings()
