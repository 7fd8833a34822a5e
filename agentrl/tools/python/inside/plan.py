"""What the host tells the sandbox when it comes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

# No /dev/zero: a mapping of it is memory that processes share and that is counted nowhere.
DEVICES = ("null", "full", "random", "urandom")


class SandboxPlan(TypedDict):
    """What the sandbox is made of. All paths are absolute.

    seen: [path outside, path inside], read-only. hidden: folders inside that are made empty.
    links: [path inside, where it points]. packages: the folder inside that is searched for packages.
    """

    seen: Sequence[Sequence[str]]
    hidden: Sequence[str]
    links: Sequence[Sequence[str]]
    packages: str
    preload: Sequence[str]
    environment: Mapping[str, str]
