"""The example of Search-R1: its run file for GPUs is valid, and its run on a CPU learns over HTTP."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

import agentrl
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from agentrl.run.dry_run import dry_run
from agentrl.weights.hf.tensors import tensor_shapes
from envs_contrib.search_r1.__main__ import main
from envs_contrib.search_r1.protocol import PROMPT

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_r1"
RECIPES = Path(__file__).parents[2] / "agentrl/cli/recipe_files"
# The sizes in the published config of Qwen2.5-3B.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
PARAMETERS = 3_085_938_688
GIB = 2**30


def write_model(folder: Path) -> None:
    """A model directory of the true sizes, whose weights take no space: the file has a hole for them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN))
    train_tokenizer([PROMPT], special_tokens=(), vocab_size=400).save_pretrained(folder)
    header, end = {}, 0
    for name, shape in tensor_shapes(AutoConfig.from_pretrained(folder)).items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    prompt = [{"role": "user", "content": PROMPT.replace("{question}", "who wrote faust?")}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": {"target": ["Goethe"]}, "style": "rule"}}
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row] * 5), folder / f"{split}.parquet")


def test_the_run_file_for_gpus_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "Qwen2.5-3B")
    write_data(tmp_path / "data" / "nq_search")
    report = dry_run(RECIPES / "search-r1-qwen2.5-3b.toml", {"output_dir": str(tmp_path)})
    facts = report.as_json()
    assert facts["model"]["parameters"]["total"] == PARAMETERS
    assert facts["model"]["sizes"]["layers"] == 36
    assert (facts["prompts"]["training"], facts["prompts"]["held_out"]) == (5, 5)
    assert "Question: who wrote faust?" in facts["prompts"]["first"]
    ranks = facts["memory"]["trainer, each of 8 ranks"]
    # Policy and reference; fp32 gradients; fp32 weights and two means over eight ranks.
    assert ranks["weights_bytes"] == pytest.approx(2 * 2 * PARAMETERS, rel=0.001)
    assert ranks["gradients_bytes"] == pytest.approx(4 * PARAMETERS, rel=0.001)
    assert ranks["optimizer_bytes"] == pytest.approx(12 * PARAMETERS / 8, rel=0.001)
    # With the servers' share of 0.4 it fits into 80 GB.
    assert ranks["total_bytes"] < 0.55 * 80e9
    assert facts["gpus"] == {"of_the_trainer": 8, "of_servers": 8, "present": []}
    assert ["SGLang" in report.missing[0], *(line[:6] for line in report.missing[1:3])] == [
        True,
        "8 GPUs",
        "8 GPUs",
    ]
    # The disk of a machine that the run is not for is missing, not wrong.
    assert [line.split(":")[0] for line in report.missing[3:]] in ([], [f"output_dir = {str(tmp_path)!r}"])
    assert report.notes == ()


def test_the_run_file_for_the_cpu_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = dry_run(EXAMPLE / "run.toml", {}).as_json()
    assert facts["prompts"]["longest"] < 230
    assert 0.6e6 < facts["model"]["parameters"]["total"] < 0.9e6
    assert (facts["missing"], facts["notes"]) == ([], [])


@contextmanager
def served(corpus: Path):
    """`agentrl serve-search` in a process of its own; yields its address."""
    command = [sys.executable, "-m", "agentrl.cli", "serve-search", str(corpus), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_an_agent_learns_to_search_over_http(tmp_path):
    main([str(tmp_path / "world")])
    (tmp_path / "nothing.jsonl").write_text(json.dumps({"id": "0", "contents": "zebra\nzebra"}))
    with served(tmp_path / "world" / "corpus.jsonl") as url, served(tmp_path / "nothing.jsonl") as empty:
        fixed = {"output_dir": str(tmp_path), "env_kwargs": {"retriever": url, "topk": 1}, "quiet": True}
        run = agentrl.train(EXAMPLE / "run.toml", name="learns", **fixed)
        before, after = (run.reports[name] for name in ("after warm start", "after RL"))
        assert after["sampled"].mean >= before["sampled"].mean + 0.3
        assert before["greedy"].by["hops=2"] < 0.1
        assert after["greedy"].by["hops=2"] > 0.9
        assert after["sampled"].parts["format"] > 0.95
        # The same start, every episode rewarded with a random sibling's reward.
        start = {"hf_checkpoint": str(run.folder / "checkpoint-warm-start"), "warm_start_steps": 0}
        shuffled = agentrl.train(
            EXAMPLE / "run.toml", name="shuffled", shuffle_rewards=True, num_rollout=15, **fixed, **start
        )
        assert shuffled.reports["after RL"]["sampled"].mean < before["sampled"].mean + 0.1
        # What it has learned is to search: without documents it knows nothing.
        report = agentrl.evaluate(
            "SearchR1-v0",
            run.folder / "checkpoint",
            n=128,
            env_kwargs={"retriever": empty, "topk": 1},
            rollout_max_context_len=384,
            quiet=True,
        )
        assert report.mean < 0.1
