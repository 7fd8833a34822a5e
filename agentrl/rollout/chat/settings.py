"""What is asked of an endpoint in every turn, and what a turn costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.protocols import ToolSchema
from agentrl.rollout.chat.wire import Body
from agentrl.types import JSON, Usage

# Some servers take a seed of 32 bits, with its sign.
_SEEDS = 1 << 31


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens, in any currency. cached: of prompt tokens that came from the endpoint's cache."""

    prompt: float
    completion: float
    cached: float

    def cost(self, usage: Usage) -> float:
        """What a turn cost, in the currency's unit."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        millionths = (
            fresh * self.prompt
            + usage.cached_tokens * self.cached
            + usage.completion_tokens * self.completion
        )
        return millionths / 1e6


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How an endpoint is asked.

    max_tokens: of one turn; None = the endpoint's own limit. reasoning: whether what it thought is sent back.
    body: more fields of a request. omit: fields that are left out. prices: None = nothing is known of them.
    """

    model: str
    temperature: float = 1.0
    max_tokens: int | None = None
    reasoning: Literal["keep", "drop"] = "keep"
    body: Mapping[str, JSON] = field(default_factory=dict)
    omit: Sequence[str] = ()
    prices: Prices | None = None

    def request(
        self, messages: Sequence[Body], tools: Sequence[ToolSchema], *, seed: int, room: int | None = None
    ) -> Body:
        """The body of a request. room: tokens that the episode has left for this turn, None = any."""
        bounds = [bound for bound in (self.max_tokens, room) if bound is not None]
        whole: Body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "seed": seed % _SEEDS,
            **({"max_tokens": min(bounds)} if bounds else {}),
            **({"tools": [_as_function(tool) for tool in tools]} if tools else {}),
            **self.body,
        }
        return {name: value for name, value in whole.items() if name not in self.omit}


def _as_function(tool: ToolSchema) -> JSON:
    described: JSON = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": described}
