"""Settings of the search server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config import Section


class ServeSearch(Section):
    """The index that is served, and the address."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen at; 0 = any that is free."""
    allowed_hosts: str = ""
    """Names by which clients address the server, beside localhost and its IP address (comma-separated)."""
    topk: Annotated[int, Field(ge=1, le=100)] = 3
    """Passages for a query, at most, where a request has no `topk` (count)."""
    index: Literal["bm25", "dense", "hybrid"] | None = None
    """Search by words, by meaning, or both; none = the kind in the folder, or dense with an encoder."""
    encoder: str | None = None
    """A sentence-transformers folder, or module:name of a function from texts to float32 vectors."""
    save: str | None = None
    """Save the index in a new folder, to serve it the next time without building it (folder)."""
