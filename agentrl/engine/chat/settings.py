"""The request of every turn to an endpoint, and the cost of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.engine.chat.wire import Body
from agentrl.types import JSON, Usage
from agentrl.types.seams import ToolSchema

# Some servers accept only seeds that fit a signed 32-bit integer.
_SEEDS = 1 << 31


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens, in any currency. cached: of prompt tokens from the endpoint's cache."""

    prompt: float
    completion: float
    cached: float

    def cost(self, usage: Usage) -> float:
        """The cost of a turn, in the currency's unit."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        millionths = (
            fresh * self.prompt
            + usage.cached_tokens * self.cached
            + usage.completion_tokens * self.completion
        )
        return millionths / 1e6


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of every request to an endpoint.

    max_tokens: of one turn; None = the endpoint's own limit. reasoning: whether reasoning is sent back.
    body: more fields of a request. omit: fields that are left out. prices: None = costs are not computed.
    """

    model: str
    temperature: float = 1.0
    max_tokens: int | None = None
    reasoning: Literal["keep", "drop"] = "keep"
    body: Mapping[str, JSON] = field(default_factory=dict)
    omit: Sequence[str] = ()
    prices: Prices | None = None

    def request(
        self,
        messages: Sequence[Body],
        tools: Sequence[ToolSchema],
        *,
        seed: int,
        num_free_tokens: int | None = None,
        response_format: JSON = None,
    ) -> Body:
        """The body of a request.

        num_free_tokens: the episode's limit for this turn; None = no limit. response_format: None = any.
        """
        bounds = [bound for bound in (self.max_tokens, num_free_tokens) if bound is not None]
        body: Body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "seed": seed % _SEEDS,
            **({"max_tokens": min(bounds)} if bounds else {}),
            **({"tools": [_as_function(tool) for tool in tools]} if tools else {}),
            **({} if response_format is None else {"response_format": response_format}),
            **self.body,
        }
        return {name: value for name, value in body.items() if name not in self.omit}


def _as_function(tool: ToolSchema) -> JSON:
    function: JSON = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}
