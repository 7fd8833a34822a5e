"""Who plays along, where an environment has several agents."""

from __future__ import annotations

from pydantic import Field

from agentrl.config import Section

SCRIPT = "script"


class OpponentChoice(Section):
    """Frozen agents of an environment that has several."""

    opponents: dict[str, str] = Field(default_factory=dict)
    """Who plays agents that are not trained, by name: `script` (the environment's own), a chat endpoint
    (http://127.0.0.1:30000/v1), a model of [engine.sglang_models] or a Hugging Face directory; the policy
    plays all others (a table; as a flag: JSON)."""
