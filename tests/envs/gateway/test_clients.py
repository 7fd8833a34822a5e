"""Clients and frameworks of others play as they are: the journal has the tokens that the engine has sampled.

A small model that was trained on their conversations opens boxes with them (`boxes`): it calls their tool,
also twice in a turn, and answers. All clients are installed in one environment beside ours, and each way of
each client is a process of its own. tests/sglang/test_clients.py plays the same on a real SGLang.
"""

from __future__ import annotations

import pytest

from agentrl.engine.embedded import EmbeddedEngine
from tests.envs.gateway.boxes import WAYS, Boxes, trained_model
from tests.envs.gateway.played import NUM_SAMPLES, check, played
from tests.envs.gateway.sampled import logged

pytestmark = pytest.mark.full


@pytest.mark.parametrize("client", WAYS)
def test_the_journal_has_what_the_embedded_engine_has_sampled(
    client, tmp_path, tmp_path_factory, monkeypatch
):
    model = trained_model(tmp_path_factory.getbasetemp().parent)
    sampled = logged(EmbeddedEngine, monkeypatch)
    run = played(client, model, tmp_path, inline=True, max_slots=16)
    check(client, run, sampled)


def test_they_are_two_hundred_episodes():
    assert len(Boxes("").tasks("train")) * NUM_SAMPLES >= 200
