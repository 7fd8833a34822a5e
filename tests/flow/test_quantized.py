"""Whole runs whose engine computes with weights in fewer bits, and whose trainer does not."""

from __future__ import annotations

import json

import pytest
import torch

from agentrl.engine.embedded.engine import EmbeddedEngine
from agentrl.errors import ConfigError
from agentrl.weights.codec import named_weights, unpack
from agentrl.weights.hf.casting import cast_directory
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.tensors import TensorFiles
from agentrl.weights.staging import Transaction
from tests.flow.runs import WARM, metrics_of, train
from tests.weights.hf.quantizing import rounded_by

pytestmark = pytest.mark.full

MISMATCH = "train/train_rollout_logprob_abs_diff"
SHORT = {"num_rollout": 3, "eval_interval": 1000}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    run = train("Bandit", tmp_path_factory.mktemp("runs"), "warm", num_rollout=0, **WARM)
    return run.folder / "checkpoint"


@pytest.fixture(scope="module")
def plain(warm, tmp_path_factory):
    return train("Bandit", tmp_path_factory.mktemp("runs"), "plain", hf_checkpoint=str(warm), **SHORT)


@pytest.mark.parametrize("cast", ["fp8", "int4"])
def test_the_engine_gets_rounded_weights_and_the_mismatch_is_measured(
    warm, plain, tmp_path, monkeypatch, cast
):
    cast_directory(warm, tmp_path / cast, cast)
    sent, put = {}, Transaction.put

    async def recorded(self, bucket):
        sent.setdefault(self._version, {}).update(unpack(bucket))
        await put(self, bucket)

    monkeypatch.setattr(Transaction, "put", recorded)
    run = train("Bandit", tmp_path, "run", hf_checkpoint=str(tmp_path / cast), **SHORT)
    assert sorted(sent) == [1, 2, 3]
    trained = dict(named_weights(open_directory(run.folder / "checkpoint", torch.float32)))
    with TensorFiles(tmp_path / cast) as files:
        matrices = files.matrices
    assert len(matrices) == 7
    for name, tensor in trained.items():
        expected = rounded_by(tensor.numpy(), cast, torch.float32) if name in matrices else tensor
        assert torch.equal(sent[3][name], expected), name
        assert torch.equal(expected, tensor) == (name not in matrices), name
    rows, before = ([row[MISMATCH] for row in metrics_of(r.folder) if MISMATCH in row] for r in (run, plain))
    assert len(rows) == len(before) == 3
    # Before the first update both begin with the numbers of the file.
    assert max(before) < 1e-5
    assert rows[0] < 1e-5
    assert min(rows[1:]) > 100 * max(before)
    # What is saved is a model of its own.
    config = json.loads((run.folder / "checkpoint" / "config.json").read_text())
    assert "quantization_config" not in config


def test_a_run_that_is_resumed_ends_as_one_that_was_not(warm, tmp_path):
    cast_directory(warm, tmp_path / "fp8", "fp8")
    shared = {**SHORT, "hf_checkpoint": str(tmp_path / "fp8"), "save_interval": 1}
    straight = train("Bandit", tmp_path, "straight", **shared)
    train("Bandit", tmp_path, "halves", **{**shared, "num_rollout": 2})
    halves = train("Bandit", tmp_path, "halves", resume=True, **shared)
    first, second = (
        dict(named_weights(open_directory(run.folder / "checkpoint", torch.float32)))
        for run in (straight, halves)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_engine_and_trainer_in_processes_of_their_own_differ_by_the_cast(warm, tmp_path):
    cast_directory(warm, tmp_path / "fp8", "fp8")
    run = train(
        "Bandit", tmp_path, "run", **{**SHORT, "hf_checkpoint": str(tmp_path / "fp8"), "inline": False}
    )
    rows = [row[MISMATCH] for row in metrics_of(run.folder) if MISMATCH in row]
    assert rows[0] < 1e-5
    assert min(rows[1:]) > 1e-4


def test_what_an_engine_cannot_take_is_refused_before_anything_starts(warm, tmp_path):
    for cast in ("int4", "fp8-tensor"):
        cast_directory(warm, tmp_path / cast, cast)
    served = {"engine": "sglang", "sglang_url": "http://127.0.0.1:9", "num_rollout": 1}
    for cast, says in (("int4", "int4 by compressed-tensors"), ("fp8-tensor", "fp8 by fp8")):
        with pytest.raises(
            ConfigError, match=f"has weights in {says}, and SGLang takes new ones in block fp8"
        ):
            train("Bandit", tmp_path, cast + "-run", hf_checkpoint=str(tmp_path / cast), **served)
    with pytest.raises(ConfigError, match="is quantized, and a warm start of it would leave"):
        train("Bandit", tmp_path, "warmer", hf_checkpoint=str(tmp_path / "int4"), num_rollout=1, **WARM)


async def test_an_engine_alone_serves_what_the_numbers_stand_for(warm, tmp_path):
    cast_directory(warm, tmp_path / "int4", "int4")
    engine = EmbeddedEngine.from_pretrained(tmp_path / "int4", max_slots=1, max_context_len=16)
    assert engine.version == 0
    await engine.close()
