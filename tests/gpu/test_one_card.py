"""A rank and a server on one GPU: side by side and in turns; what is held is what the dry run said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import agentrl
from agentrl.processes.gpus import present_gpus
from agentrl.records.gpu_memory import holders
from agentrl.run.dry_run import dry_run
from agentrl.weights.hf.export import save_model
from tests.flow.runs import metrics_of
from tests.trainer.tiny import tokenizer

pytestmark = pytest.mark.gpu
GIVEN = [python] if (python := os.environ.get("AGENTRL_SGLANG_PYTHON")) else []
TOLERANCE = 0.1
"""How far the peak may be from the prediction."""
MODES = {
    "side by side": {},
    "asynchronous": {"max_staleness": 1, "correction": "tis"},
    "in turns": {"colocate": True},
}


class Peak:
    """The most that the first GPU had in use in its block, by the driver (bytes).

    by_name: by process, where the driver knows them: in a container it may not.
    """

    def __enter__(self):
        self.most, self.by_name, self._is_over = 0, {}, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _watch(self):
        while not self._is_over.wait(0.2):
            self.most = max(self.most, in_use())
            for holder in holders():
                self.by_name[holder.name] = max(self.by_name.get(holder.name, 0), holder.held)


def in_use():
    """What the first GPU has in use, whoever holds it (bytes)."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0]) << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of Qwen3-0.6B's shape but for its vocabulary, with weights at random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model") / "model"
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    save_model(Qwen3ForCausalLM(config).to(torch.bfloat16), words, folder)
    return folder


def settings_of(model, folder, **mode):
    return {
        "env": "tests.flow.worlds:Talkative",
        "hf_checkpoint": str(model),
        "output_dir": str(folder),
        "trainer": "megatron",
        "bf16": True,
        "max_tokens_per_gpu": 8192,
        "engine": "sglang",
        "sglang_python": GIVEN[0],
        "rollout_num_gpus_per_engine": 1,
        "sglang": {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"},
        "warm_start_steps": 0,
        "num_rollout": 3,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 16,
        "eval_episodes": 16,
        "eval_interval": 100,
        "use_tensorboard": False,
        **mode,
    }


@pytest.mark.parametrize("agentrl_sglang_python", GIVEN)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_on_one_card_holds_what_was_predicted(model, tmp_path, mode, agentrl_sglang_python):
    del agentrl_sglang_python
    settings = settings_of(model, tmp_path, **MODES[mode])
    predicted = dry_run(None, settings).sections["shared_gpus"]
    before = in_use()
    began_s = time.monotonic()
    with Peak() as peak:
        folder = agentrl.train(quiet=True, **settings).folder
    held = {name: f"{size / 2**30:.1f} GiB" for name, size in peak.by_name.items()}
    print(mode, json.dumps(predicted), held, f"{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    assert len([row for row in metrics_of(folder) if "train/loss" in row]) == 3
    assert peak.most - before <= present_gpus()[0].memory
    assert peak.most - before == pytest.approx(predicted["peak_bytes"], rel=TOLERANCE)
