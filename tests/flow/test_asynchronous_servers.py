"""Asynchronous runs on servers: `agentrl serve`, and a real SGLang with weights of Megatron's ranks."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from agentrl.engine.served.config import CONTROL_KEY
from tests.engine.serving import free_port, running, sglang_python
from tests.flow.runs import SHAPE, metrics_of, train
from tests.flow.test_asynchronous import LATE, staleness_of, steps_of, versions_of
from tests.flow.test_megatron import ON_TWO
from tests.flow.test_resume import SMALL, accounted

RUN = {**LATE, "inline": False, "staleness_policy": "strict", "num_rollout": 6}
ON_POLICY = 1e-3
"""How far the logprobs of engine and trainer may be apart at one version, in fp32."""


def check(folder):
    """Tokens are older, within the bound; each prompt is accounted for; and fresh tokens are on-policy."""
    staleness = staleness_of(folder)
    assert len(staleness) == RUN["num_rollout"]
    assert 0 < max(stale_T.max() for stale_T in staleness if len(stale_T)) <= RUN["max_staleness"]
    found = accounted(folder)
    assert (found.ahead, found.saved) == (0, 0)
    rows = metrics_of(folder)
    fresh = [row["train/staleness_0/k3"] for row in rows if "train/staleness_0/k3" in row]
    assert fresh
    assert max(fresh) < ON_POLICY**2, "k3 is about half the square of the difference"
    stale = [row["train/staleness_1/k3"] for row in rows if "train/staleness_1/k3" in row]
    assert max(stale) > 100 * max(fresh), "their logprobs are those of the weights that sampled them"


@pytest.mark.full
@pytest.mark.parametrize("players", [0, 2])
def test_groups_are_played_on_a_server_while_others_are_trained(tmp_path, monkeypatch, players):
    monkeypatch.setenv(CONTROL_KEY, "key-of-these-tests")
    initial = train("Talkative", tmp_path, "initial", **{**SMALL, "num_rollout": 1}).folder / "checkpoint"
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "agentrl.cli", "serve", initial, "--port", str(port), "--max-slots", "8"]
    with running([*command, "--max-context-len", "256"], address, "/health", tmp_path / "server.log"):
        opened = {name: value for name, value in RUN.items() if name not in SHAPE}
        served = {"engine": "sglang", "sglang_url": address, "update_weights_transport": "disk"}
        served |= {"num_rollout_workers": players}
        folder = train(
            "Talkative", tmp_path, "x", **{**opened, "hf_checkpoint": str(initial), **served}
        ).folder
    check(folder)


@pytest.mark.full
@pytest.mark.parametrize("players", [0, 2])
def test_megatron_trains_while_sglang_plays(tmp_path, players):
    """Players send their requests to the server themselves, and are held while new weights come."""
    servers = {"engine": "sglang", "sglang_python": str(sglang_python()), "max_slots": 8}
    servers |= {"num_rollout_workers": players}
    layout = {**ON_TWO, "num_query_groups": 2}
    folder = train("Talkative", tmp_path, "x", **{**RUN, **servers, **layout}).folder
    check(folder)
    versions = [np.concatenate(versions_of(entry)) for entries in steps_of(folder) for entry in entries]
    assert all(np.all(np.diff(versions_T) >= 0) for versions_T in versions), "versions only grow"
