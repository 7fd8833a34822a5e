"""The benchmark of gateways side by side, with a small load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentrl.errors import UserError
from benchmarks.peers.gateways import GatewaysLoad, bench_gateways

SMALL = GatewaysLoad(episodes=4, rounds=2, repeats=2)


def quiet(message):
    """Says nothing."""


@pytest.mark.full
def test_every_side_is_measured_and_every_request_recorded():
    configured = os.environ.get("AGENTRL_AGENTLIGHTNING_PYTHON")
    python = None if configured is None else Path(configured)
    result = bench_gateways(python, load=SMALL, on_event=quiet)
    assert json.loads(json.dumps(result)) == result
    sides = ["agentrl"] if python is None else ["agentrl", "agent-lightning"]
    assert list(result["sides"]) == sides
    for side in sides:
        assert result["summary"][side]["cpu_ms"] > 0
        assert len(result["sides"][side]["wall_ms"]["repeats"]) == 2
    assert result["settings"]["load"]["episodes"] == 4
    assert SMALL.requests == 32


def test_an_interpreter_without_agent_lightning_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3"}\'\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"lacks agentlightning.*--agentlightning-python"):
        bench_gateways(python, load=SMALL, on_event=quiet)
