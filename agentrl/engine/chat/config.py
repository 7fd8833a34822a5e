"""Settings of a chat endpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config import IN_COMMAS, Changes, Count, Section
from agentrl.types import JSON

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
_RESERVED = ("model", "messages", "tools", "stream", "n")
Price = Annotated[float, Field(ge=0.0)]


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible chat endpoint."""

    openai_url: Annotated[str | None, Changes.PLACE] = None
    """Address of the API; requests go to URL/chat/completions, so it usually ends in /v1."""
    openai_model: str | None = None
    """Name of the model at the endpoint."""
    openai_key_env: Annotated[str, Changes.SPEED] = DEFAULT_KEY_ENV
    """Environment variable that holds the key; the key itself is written nowhere."""
    openai_max_tokens: Count | None = None
    """Most tokens in one turn of the model (tokens); left out, the endpoint's own limit."""
    openai_reasoning: Literal["keep", "drop"] = "keep"
    """`keep` sends the model's reasoning back with its turns, in the field or the content that it came in;
    `drop` does not."""
    openai_body: dict[str, JSON] = Field(default_factory=dict)
    """More fields of every request (JSON), such as {"reasoning_effort": "low"}."""
    openai_omit: Annotated[tuple[str, ...], IN_COMMAS] = ()
    """Fields left out of every request, for endpoints that refuse them (as a flag: temperature,seed)."""
    openai_concurrency: Annotated[Count, Changes.SPEED] = 16
    """Episodes played, and requests sent, at once (count)."""
    openai_timeout_s: Annotated[float, Field(gt=0.0), Changes.SPEED] = 300.0
    """Longest a turn may take, all attempts and the waits between them included (seconds)."""
    openai_attempts: Annotated[Count, Changes.SPEED] = 6
    """How often a request is sent, at most: again where the connection broke, or on 408, 429, 5xx (count)."""
    price_prompt: Price | None = None
    """Price of a million prompt tokens, in any currency."""
    price_completion: Price | None = None
    """Price of a million completion tokens, reasoning included."""
    price_cached: Price | None = None
    """Price of a million prompt tokens that came from the endpoint's cache; left out, price_prompt."""

    @model_validator(mode="after")
    def _is_complete(self) -> EndpointConfig:
        if (self.openai_url is None) != (self.openai_model is None):
            missing = "openai_model" if self.openai_model is None else "openai_url"
            raise ValueError(f"an endpoint needs openai_url and openai_model; give {missing}, too.")
        if self.openai_url is None and self.model_fields_set:
            stray = sorted(self.model_fields_set)[0]
            raise ValueError(f"{stray} is for a chat endpoint; give openai_url and openai_model, too.")
        if (self.price_prompt is None) != (self.price_completion is None):
            raise ValueError("the cost needs price_prompt and price_completion; give both, or neither.")
        if self.price_cached is not None and self.price_prompt is None:
            raise ValueError("price_cached needs price_prompt and price_completion; give them, too.")
        if reserved := [name for name in (*self.openai_body, *self.openai_omit) if name in _RESERVED]:
            raise ValueError(
                f"`{reserved[0]}` of a request is not for openai_body or openai_omit; leave it out."
            )
        return self
