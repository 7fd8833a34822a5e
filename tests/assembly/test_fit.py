"""The longest row that fits is the longest that fits, for every way to train a model."""

from __future__ import annotations

import json

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.assembly.cards import CONTEXT_BYTES, SPARE, rank_on_card
from agentrl.assembly.fit import Cards, fit
from agentrl.assembly.load import load_run
from agentrl.cli import main
from agentrl.processes import gpus as gpus_module
from agentrl.weights.hf.source import open_config

GIB = 2**30
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
CARD = Cards(1, 3 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit") / "model"
    Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    return folder


def rank_of(model, settings):
    """A rank by the tokens of its row, in a run of these settings."""
    fixed = {"engine": "sglang", "rollout_num_gpus_per_engine": 1, "colocate": True, "warm_start_steps": 0}
    config = load_run(None, {**fixed, "hf_checkpoint": str(model), "bf16": True, **settings})
    return rank_on_card(config, open_config(model), CARD.memory)


def test_no_longer_row_fits_and_this_one_does(model):
    report = fit(model, CARD, {}, 2048)
    # Server and rank keep their contexts, and graphs of 256 requests of 2 MiB.
    assert report.available == int(3 * GIB * (1 - SPARE)) - CONTEXT_BYTES - 256 * 2 * 2**20
    ways = [(way.settings["lora_rank"], way.settings["gradient_checkpointing"]) for way in report.ways]
    assert ways == [(None, False), (None, True), (16, False), (16, True)]
    for way in report.ways:
        at = rank_of(model, way.settings)
        assert way.memory == at(2048)
        assert at(way.longest).total <= report.available < at(int(1.015 * way.longest) + 512).total
    kept, again, *_ = (way.longest for way in report.ways)
    assert again > 1.5 * kept > 1000
    assert report.context == 4096


def test_nothing_fits_where_not_even_the_weights_do(model):
    report = fit(model, Cards(1, int(1.3 * GIB)), {}, 2048)
    assert [way.longest for way in report.ways] == [0, 0, 0, 0]
    assert report.cached == 0


def test_more_gpus_share_weights_and_optimizer(model):
    one, four = (fit(model, Cards(number, 3 * GIB), {}, 512).ways[0].memory for number in (1, 4))
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=0.02)
    assert four.weights < one.weights


def test_a_run_file_brings_its_reference_and_its_rank(model, tmp_path):
    (tmp_path / "run.toml").write_text(
        f"[model]\nhf_checkpoint = '{model}'\n"
        "[trainer]\nlora_rank = 4\n"
        "[algorithm]\nuse_kl_loss = true\nkl_loss_coef = 0.1\n"
    )
    plain, run = (fit(what, CARD, {}, 512) for what in (model, tmp_path / "run.toml"))
    # The reference of a full run is a second network; adapters have it for nothing.
    assert run.ways[0].memory.weights > 1.5 * plain.ways[0].memory.weights
    assert run.ways[2].settings["lora_rank"] == 4
    assert run.ways[2].memory.weights < plain.ways[2].memory.weights


def test_layouts_of_megatron_are_those_that_the_model_can_have(model):
    ways = fit(model, Cards(8, 3 * GIB), {"trainer": "megatron"}, 512).ways
    sizes = {
        (way.settings["tensor_model_parallel_size"], way.settings["pipeline_model_parallel_size"])
        for way in ways
    }
    # Two heads of keys, two layers.
    assert sizes == {(t, p) for t in (1, 2) for p in (1, 2)}
    assert len(ways) == 2 * len(sizes)


def test_the_last_pipeline_rank_has_what_is_left_of_layers_that_no_pipeline_divides(tmp_path, capsys):
    Qwen3Config(**{**SMALL, "num_hidden_layers": 5}).save_pretrained(tmp_path)
    ways = fit(tmp_path, Cards(8, 3 * GIB), {"trainer": "megatron"}, 512).ways
    shares = {
        tuple(map(len, layout.stages(5)))
        for layout in (way.config.layout for way in ways)
        if layout.tensor_model_parallel_size == 1
    }
    # Four ranks would leave -1 layers to the last, and eight are more than there are.
    assert shares == {(5,), (3, 2)}
    main(["fit", str(tmp_path), "--gpus", "8", "--memory", "3", "--context", "512", "--trainer", "megatron"])
    assert "PP 2 (last 2)" in capsys.readouterr().out


def test_layouts_of_experts_are_tried_and_the_fastest_that_fits_is_named(tmp_path, capsys):
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    Qwen3MoeConfig(**SMALL, **moe, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path)
    report = fit(tmp_path, Cards(16, 3 * GIB), {"trainer": "megatron"}, 512)
    layouts = [way.config.layout for way in report.ways]
    assert {layout.world_size for layout in layouts} == {16}
    tried = {
        (each.tensor_model_parallel_size, each.expert_model_parallel_size, each.expert_tensor_ranks)
        for each in layouts
        if each.pipeline_model_parallel_size == 1
    }
    assert tried == {(1, 8, 1), (2, 8, 1), (2, 8, 2)}
    best = report.fastest
    assert best.speed == max(way.speed for way in report.ways if way.memory.total <= report.available)
    assert fit(tmp_path, Cards(16, GIB), {"trainer": "megatron"}, 512).fastest is None
    main(["fit", str(tmp_path), "--gpus", "16", "--memory", "3", "--context", "512", "--trainer", "megatron"])
    assert f" *{best.speed:,.0f}" in capsys.readouterr().out


def test_the_command_prints_a_table_or_json(model, capsys):
    main(["fit", str(model), "--memory", "3", "--context", "512"])
    text = capsys.readouterr().out
    assert "one GPU of 3.0 GiB, and a row of 512 tokens" in text
    assert "LoRA 16, again" in text
    main(["fit", str(model), "--memory", "3", "--context", "512", "--lora-rank", "2", "--json"])
    facts = json.loads(capsys.readouterr().out)
    report = fit(model, CARD, {"lora_rank": 2}, 512)
    assert [way["longest_row_tokens"] for way in facts["ways"]] == [way.longest for way in report.ways]
    assert [way["total_bytes"] for way in facts["ways"]] == [way.memory.total for way in report.ways]
    assert facts["server"]["episodes_at_once"] == report.cached // 512


def test_where_no_gpu_is_its_memory_has_to_be_said(model, monkeypatch, capsys):
    monkeypatch.setattr(gpus_module, "present_gpus", tuple)
    with pytest.raises(SystemExit) as caught:
        main(["fit", str(model)])
    assert caught.value.code == 2
    assert "say how large one is, such as --memory 80" in capsys.readouterr().err
