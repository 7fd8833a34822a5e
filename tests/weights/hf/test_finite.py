"""A model whose weights are not finite numbers is refused where it is opened, before anything is sampled."""

from __future__ import annotations

import pytest
import torch

import agentrl
from agentrl.errors import ModelLoadError, UserError
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.tensors import TensorFiles
from tests.trainer.tiny import qwen3, tokenizer

POISONED = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=[float("nan"), float("-inf")], ids=["NaN", "inf"])
def folder(request, tmp_path_factory):
    """A model with one such weight."""
    folder, model = tmp_path_factory.mktemp("model"), qwen3(torch.float32)
    with torch.no_grad():
        dict(model.named_parameters())[POISONED][3, 2] = request.param
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_a_model_with_a_weight_that_is_not_finite_is_not_opened(folder):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ModelLoadError, match=f"not finite numbers, in {POISONED}: .* earlier checkpoint"):
            open_directory(folder, dtype)


def test_nor_is_its_tensor_read_and_the_others_are(folder):
    with TensorFiles(folder) as files:
        with pytest.raises(ModelLoadError, match=POISONED):
            files.read(POISONED)
        for name in files.names - {POISONED}:
            assert files.read(name).isfinite().all()


def test_an_evaluation_of_it_is_one_sentence_that_names_the_tensor(folder):
    with pytest.raises(UserError, match=POISONED):
        agentrl.evaluate("Calculator-v0", folder, n=1)
