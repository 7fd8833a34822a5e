"""The work of a renderer in a process of its own; a program for `agentrl/processes/forking.py`."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from agentrl.errors import AgentRLError
from agentrl.rendering.bounded import TokenRenderer


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """The function from pickled work to its pickled result, or to the AgentRLError that it raised.

    setup: the pickled renderer.
    """
    renderer: TokenRenderer = pickle.loads(setup)
    # What libraries import at their first use is imported before any worker is forked.
    renderer.parse((), ())

    def reply(request: bytes) -> bytes:
        work: Callable[[TokenRenderer], object] = pickle.loads(request)
        try:
            return pickle.dumps(work(renderer))
        except AgentRLError as error:
            return pickle.dumps(error)

    return reply
