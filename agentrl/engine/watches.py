"""Who is told the tokens of a session's request while they are sampled; see `StreamingPolicy`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.types.seams import Watch


class Watches(dict[str, Watch]):
    """By session."""

    @contextmanager
    def watched(self, session: str, watch: Watch) -> Iterator[None]:
        """Tell `watch` during the block the tokens of the session's request."""
        self[session] = watch
        try:
            yield
        finally:
            del self[session]
