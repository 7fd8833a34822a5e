"""`agentrl numerics MODEL`: engine and trainer agree on a model, and one that reads it otherwise is found."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.algorithms import off_policy
from agentrl.cli import main
from agentrl.engine.served.config import CONTROL_KEY
from tests.engine.serving import free_port, running, sglang_python
from tests.rendering.real_templates import template
from tests.rendering.subjects import CHATML, tokenizer
from tests.trainer.tiny import widened

FEW = ("--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--max-turns", "2")
SHORT = (*FEW, "--rollout-max-response-len", "64")
FP32 = 1e-4
"""How far logprobs of engine and trainer may be apart, in fp32 (nats)."""


def save_model(folder, rope_theta=1e4):
    """The same weights for every base of the rotary encoding, with Qwen3's chat template."""
    words = tokenizer("byte-level", CHATML, "<|im_end|>", template("qwen3"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
    )
    widened(Qwen3ForCausalLM(config), torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def numerics(model, capsys, tmp_path, monkeypatch):
    """The command, in an empty folder; what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        main(["numerics", str(model), "--json", *map(str, words)])
        assert not (tmp_path / "runs").exists()
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def compared(monkeypatch):
    """What the command compares: tokens, and their logprobs."""
    seen = []

    def noting(tokens, scores):
        seen.append((tokens, scores))
        return measured(tokens, scores)

    # A run computes the same of its batch, by the name that it has imported before.
    import_module("agentrl.run.open_run")
    measured = off_policy.mismatch_metrics
    monkeypatch.setattr(off_policy, "mismatch_metrics", noting)
    return seen


def logprobs_of(folder, samples):
    """Of all sampled tokens, in float64, by transformers."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    found = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids.tolist())
        with torch.no_grad():
            logits = network(input_ids=ids[None], use_cache=False).logits[0]
        own = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        found.append(own[np.asarray(sample.loss_mask)[1:]])
    return np.concatenate(found)


def test_engine_and_trainer_agree_on_a_chat_model(numerics, model, compared):
    found = numerics(*SHORT, "--inline")
    assert 100 < found["tokens"] <= 2 * 2 * 64
    assert 1e-8 < found["logprob_abs_diff"] < FP32
    assert found["median"] <= found["p99"] <= found["largest"] < FP32
    ((tokens, scores),) = compared
    expected = logprobs_of(model, tokens.samples)
    assert scores.proximal_N == pytest.approx(expected, abs=FP32)
    assert scores.behaviour_N == pytest.approx(expected, abs=FP32)


def test_flags_change_what_the_model_plays(numerics, compared):
    numerics(*SHORT, "--inline", "--env", "tests.flow.worlds:Bandit")
    ((tokens, _),) = compared
    assert all(sample.turns.max() == 0 for sample in tokens.samples)


@pytest.mark.full
def test_without_flags_tokens_are_at_many_depths(numerics):
    found = numerics()
    assert found["tokens"] > 4000
    assert found["largest"] < FP32
    assert found.keys() >= {"depth_0/k3", "depth_1024/k3"}
    assert max(found["depth_0/k3"], found["depth_1024/k3"]) < 1e-9


@pytest.mark.full
def test_an_engine_that_turns_keys_by_other_angles_is_found(numerics, model, compared, tmp_path, monkeypatch):
    """Its weights are the trainer's, bit for bit."""
    monkeypatch.setenv(CONTROL_KEY, "key-of-these-tests")
    other = save_model(tmp_path / "other", rope_theta=1e2)
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "agentrl.cli", "serve", other, "--port", str(port)]
    served = ("--engine", "sglang", "--sglang-url", address, "--update-weights-transport", "disk")
    with running(command, address, "/health", tmp_path / "server.log"):
        found = numerics(*SHORT, *served)
    ((tokens, _),) = compared
    differences = np.abs(logprobs_of(other, tokens.samples) - logprobs_of(model, tokens.samples))
    assert differences.mean() > 0.05
    assert found["logprob_abs_diff"] == pytest.approx(differences.mean(), rel=1e-3)
    assert found["largest"] == pytest.approx(differences.max(), rel=1e-3)


@pytest.mark.full
def test_sglang_and_megatron_agree_and_other_angles_are_found(numerics):
    real = ("--engine", "sglang", "--sglang-python", sglang_python(), "--trainer", "megatron")
    found = numerics(*FEW, *real)
    assert found["tokens"] > 100
    assert 1e-8 < found["logprob_abs_diff"] < found["largest"] < FP32
    angles = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    turned = numerics(*SHORT, *real, "--sglang-json-model-override-args", json.dumps(angles))
    assert turned["logprob_abs_diff"] > 0.05


def test_a_model_without_a_chat_template_is_one_sentence_and_plays_in_another_dialect(
    numerics, model, capsys
):
    (model / "chat_template.jinja").rename(kept := model / "template")
    try:
        with pytest.raises(SystemExit) as ended:
            numerics(*SHORT, "--inline")
        sentence = "agentrl: the tokenizer has no chat template, so it cannot speak the chat dialect; "
        assert ended.value.code == 2
        assert [line[: len(sentence)] for line in capsys.readouterr().err.splitlines()] == [sentence]
        assert numerics(*SHORT, "--inline", "--dialect", "inline")["largest"] < FP32
    finally:
        kept.rename(model / "chat_template.jinja")


def test_each_row_is_explained_and_a_line_says_what_goes_on(model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["numerics", str(model), *SHORT])
    printed = capsys.readouterr()
    assert "playing one batch" in printed.err
    rows = [re.sub(r"\d+/", "N/", line.split()[0]) for line in printed.out.splitlines()[1:] if line.strip()]
    assert {"tokens", "equal", "ess"} <= {*rows}
    main(["numerics", "--help"])
    _, _, said = capsys.readouterr().out.partition("The rows")
    explained = {word.strip(",") for word in said.split()}
    assert explained >= {*rows, "depth_N/k3"}
