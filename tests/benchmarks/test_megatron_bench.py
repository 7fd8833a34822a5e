"""The benchmark of the Megatron trainer: equal work on all sides, and a figure for every repeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from agentrl.errors import UserError
from benchmarks.batches import batch_of
from benchmarks.megatron import everything
from benchmarks.megatron.context import on_the_cpu
from benchmarks.megatron.everything import bench_megatron
from benchmarks.megatron.settings import SETTINGS, BatchWorkload, MegatronSettings


def tiny() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def tiny_config() -> PretrainedConfig:
    return tiny().config


SMALL = MegatronSettings(
    trained=tiny,
    published=tiny,
    workloads=(BatchWorkload("equal", (16, 16)), BatchWorkload("short", (3, 2), target=None)),
    row_tokens=32,
    layout_row_tokens=16,
    repeats=2,
)
ROWS = {
    "step": {"update, equal", "score, equal", "update, short", "score, short"},
    "publish": {"publish, one rank", "publish, TP2"},
    "layouts": {f"update, {name} by one rank" for name in ("TP2", "PP2", "CP2", "DP2")},
}


@pytest.mark.full
@pytest.mark.parametrize("section", ROWS)
def test_every_row_has_all_its_repeats(section):
    threads, events = torch.get_num_threads(), []
    result = bench_megatron(only=[section], settings=SMALL, on_event=events.append)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(result)) == result
    assert set(result["summary"]) == ROWS[section] == {row["name"] for row in result["rows"]}
    assert len(events) == len(result["rows"])
    for row in result["rows"]:
        assert row["device"] == "cpu"
        medians = [side["median"] for side in row["sides"].values()]
        assert all(len(side.get("seconds") or side["tokens_per_s"]) == 2 for side in row["sides"].values())
        if section == "publish":
            assert row["ratio_to_torch"] == pytest.approx(medians[0] / medians[1])
            assert row["ratio_to_copy"] == pytest.approx(medians[0] / medians[2])
            assert row["num_bytes"] == sum(p.nbytes for p in tiny().parameters())
        else:
            assert row["ratio"] == pytest.approx(medians[0] / medians[1])


def test_a_batch_fills_one_row_and_half_of_it_is_trained_on():
    for workload in SETTINGS.workloads:
        batch = batch_of(workload.lengths, 100)
        assert sum(workload.lengths) == pytest.approx(SETTINGS.row_tokens, abs=16)
        assert sum(workload.lengths) <= SETTINGS.row_tokens
        assert sum(weights.sum() for weights in batch.credit.weights) == pytest.approx(1, abs=1e-5)
    assert {8 <= length <= 16 for length in SETTINGS.workloads[-1].lengths} == {True}


@pytest.mark.parametrize("before", [None, "1"])
def test_gpus_are_hidden_from_processes_for_the_cpu_only(monkeypatch, before):
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with on_the_cpu():
        output = subprocess.run(
            [sys.executable, "-c", f"import os; print(repr(os.environ.get({name!r})))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    assert output == "''"
    assert os.environ.get(name) == before


def test_an_unknown_section_is_an_error_message():
    with pytest.raises(UserError, match="no section `stop`; there are step, publish, layouts"):
        bench_megatron(only=["stop"])
    assert set(everything.SECTIONS) == set(ROWS)
