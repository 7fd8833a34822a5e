"""What servers do, of the work on a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["regular", "prefill", "decode"]
"""All of it; or one server reads the prompt, and another writes the answer."""


def incomplete(roles: Collection[Role]) -> str:
    """What servers of these roles lack to serve requests together, in a sentence; nothing of it: ""."""
    if set(roles) in ({"regular"}, {"prefill", "decode"}, set()):
        return ""
    there = " and ".join(sorted(roles))
    return f"servers that are {there} cannot serve together; have regular ones, or both prefill and decode."
