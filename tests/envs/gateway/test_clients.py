"""Clients and frameworks of others play as they are: the journal has the tokens that the engine has sampled.

A small model that was trained on their conversations opens boxes with them (`boxes`): it calls their tool,
also twice in a turn, and answers. All clients are installed in one environment beside ours, and each is a
process of its own. tests/envs/gateway/test_clients_on_sglang.py plays the same on a real SGLang.
"""

from __future__ import annotations

import pytest

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types import Restart
from tests.envs.gateway.boxes import WAYS, Boxes, trained_model
from tests.envs.gateway.played import by_way, check, played
from tests.envs.gateway.sampled import logged

pytestmark = pytest.mark.full

NUM_SAMPLES = 3

BEGUN = {
    ("openai", "compacted"): {Restart.COMPACTED},
    ("openai", "results dropped"): {Restart.REWRITTEN},
    ("openai", "beside each other"): {Restart.PARALLEL, Restart.REWRITTEN},
    ("openai_agents", "handoff"): {Restart.SUB_AGENT},
    ("openai_agents", "sub-agent"): {Restart.SUB_AGENT},
    ("langgraph", "trimmed"): {Restart.PARALLEL},
    # It writes the calls of a reply again as a text, and their results as one of the user.
    ("smolagents", "chat"): {Restart.REWRITTEN},
}
"""Why trajectories of a way begin. In all others each request goes on from the tokens of the reply before."""
MAY_BEGIN = {
    # A reply that it cannot read is left out, and the next request says so.
    ("mini", "command"): {Restart.REWRITTEN},
    ("smolagents", "chat"): {Restart.PARALLEL},
}
"""Why some may, too."""
STRICT = {"overruled_strict"}
CHANGED = {
    **{("openai", way): STRICT for way in WAYS["openai"] if way.startswith("responses")},
    **{("openai_agents", way): STRICT for way in WAYS["openai_agents"]},
    # It parses arguments, and writes them again.
    **{("pydantic_ai", way): {"changed_arguments"} for way in ("chat", "responses")},
}
"""What clients change in messages that stay the same, and which of their settings are overruled."""
# Its history may begin with the results of calls that it has cut off.
MAY_CHANGE = {("langgraph", "trimmed"): {"changed_ids"}}


@pytest.mark.parametrize("client", WAYS)
def test_the_journal_has_what_the_embedded_engine_has_sampled(
    client, tmp_path, tmp_path_factory, monkeypatch
):
    model = trained_model(tmp_path_factory.getbasetemp().parent)
    sampled = logged(EmbeddedEngine, monkeypatch)
    run = played(client, model, tmp_path, num_samples=NUM_SAMPLES, inline=True, max_slots=16)
    entries = check(run, sampled)
    ways = by_way(entries)
    assert {way: found.number for way, found in ways.items()} == {
        (client, way): len(entries) // len(WAYS[client]) for way in WAYS[client]
    }
    begun = {way: {*found.begun} - MAY_BEGIN.get(way, set()) for way, found in ways.items()}
    assert begun == {way: BEGUN.get(way, set()) for way in ways}, ways
    changed = {way: {*found.changed} - MAY_CHANGE.get(way, set()) for way, found in ways.items()}
    assert changed == {way: CHANGED.get(way, set()) for way in ways}, ways
    assert any(found.shares[1] for found in ways.values()), "two calls in one turn"
    assert min(found.shares[0] for found in ways.values()) >= 0.5, ways


def test_they_are_two_hundred_episodes():
    assert len(Boxes("").tasks("train")) * NUM_SAMPLES >= 200
