"""Clients and frameworks of others play a tool task as they are: every token is trained where it was said."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentrl import ToolCall
from agentrl.algorithms.samples import samples_of
from agentrl.types import Restart
from tests.envs.gateway.test_recording import sampled_by, trained_in
from tests.envs.gateway.worlds import Showing, adds, played_by, says
from tests.house.source import ROOT

pytestmark = pytest.mark.full

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {"HOME": "/tmp", "PATH": "/usr/bin:/bin", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
CLIENTS = [
    *(("openai", way) for way in ("whole", "streamed", "async", "responses", "responses streamed")),
    *(("anthropic", way) for way in ("whole", "streamed", "async")),
    *(("openai_agents", way) for way in ("chat", "chat streamed", "responses", "responses streamed")),
    *(("langgraph", way) for way in ("chat", "chat streamed", "responses")),
    *(("pydantic_ai", way) for way in ("chat", "responses", "anthropic")),
    ("smolagents", "chat"),
]


def running(client, way, errors):
    """An agent that is a process of this client."""
    assert PYTHON.exists(), (
        f"make {PYTHON.parent.parent.name}/.installed makes the environment of these clients"
    )

    async def agent(url, key, task):
        variables = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        process = await asyncio.create_subprocess_exec(
            PYTHON, SCRIPTS / f"{client}_agent.py", way,
            env={**ENVIRONMENT, **variables}, stdout=-1, stderr=-1, cwd=os.environ.get("TMPDIR", "/tmp"),
        )  # fmt: skip
        output, said = await process.communicate()
        errors.append(said.decode())
        return output.decode().strip().splitlines()[-1] if output.strip() else ""

    return agent


@pytest.mark.parametrize(("client", "way"), CLIENTS)
async def test_a_client_as_it_is_plays_and_is_recorded(client, way):
    answer = says("5") if client != "smolagents" else says("", ToolCall("final_answer", {"answer": "5"}))
    errors = []
    agent = running(client, way, errors)
    # Streams of it begin before their turns end.
    policy = Showing(says("Let me see.", adds(2, 3), adds(1, 1)), answer)
    episode = await played_by(agent, policy, timeout_s=100.0, limits={"max_tokens": 6000})
    assert episode.failure is None, (episode.failure, errors)
    assert episode.total_of() == 1.0, errors
    assert trained_in(samples_of(episode)) == sampled_by(policy)
    (first, said), (second, _) = policy.asked
    reasons = [trajectory.reason for trajectory in episode.trajectories]
    if client == "smolagents":
        # It writes the calls of a reply again as a text, and their results as one of the user.
        assert reasons == [None, Restart.REWRITTEN]
        return
    # A second request that goes on from the first has its tokens, whatever the client has made of the reply.
    assert (second[: len(first) + len(said)] == (*first, *said), reasons) == (True, [None]), episode.counts
    assert "requests" in episode.counts
