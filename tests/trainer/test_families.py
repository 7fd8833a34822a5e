"""Any causal language model of transformers trains: a row gives the gradient of single sequences."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.errors import ModelLoadError
from agentrl.losses import PolicyLoss
from agentrl.trainer.torch import AuxiliaryModels
from agentrl.trainer.torch.forward import TorchNetwork
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.export import save_model
from agentrl.weights.model_types import AutoModelForCausalLM
from tests.trainer.families import FAMILIES, PACKED, family
from tests.trainer.tiny import (
    SHAPE,
    batch,
    gradients_of,
    reference_gradient,
    siblings,
    tokenizer,
    trainer,
)


@pytest.mark.parametrize("made", [batch, siblings])
@pytest.mark.parametrize("name", FAMILIES)
async def test_a_row_gives_the_gradient_of_single_sequences(name, made):
    model, train_batch = family(name), made()
    expected_loss, expected = reference_gradient(model, train_batch, imitation=False)
    with gradients_of(model) as actual:
        report = await trainer(model, PolicyLoss(), max_tokens_per_gpu=30).update(train_batch)
    assert report.metrics["train/loss"] == pytest.approx(expected_loss, rel=1e-5)
    # Some families compute norms, routers or recurrences in float32, whatever their weights are.
    most = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        assert float(gradient.abs().max()) > 0, key
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=2e-6 * most, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_share_a_row_where_their_layers_allow_it(name):
    assert TorchNetwork(family(name)).is_packed is (name in PACKED)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_published_under_the_names_that_the_family_saves(name, tmp_path):
    model = family(name)
    save_model(model, tokenizer(), str(tmp_path / "saved"))
    saved, published = load_file(tmp_path / "saved" / "model.safetensors"), dict(named_weights(model))
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[key], tensor) for key, tensor in saved.items())
    # What transformers reads back is the model.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=model.dtype).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())


async def test_a_family_that_shares_no_row_says_so():
    said = await trainer(family("gemma3")).kernels()
    assert (said or "").startswith("Gemma3ForCausalLM trains in batches of sequences of like")
    assert await trainer(family("llama")).kernels() is None
    auxiliary = AuxiliaryModels(teacher=family("gemma3"))
    assert "like length" in (await trainer(family("llama"), auxiliary=auxiliary).kernels() or "")


class Loud(LlamaForCausalLM):
    """Its logits are louder than its head says, by no setting that anybody knows."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits * 1.5
        return output


def test_what_a_model_does_to_its_logits_and_nobody_knows_is_refused():
    with pytest.raises(ModelLoadError, match="Loud changes its logits in a way that this trainer does not"):
        trainer(Loud(LlamaConfig(**SHAPE)))


def test_a_model_that_mixes_its_sequences_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))

    class Mixing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + x.mean((0, 1), keepdim=True)

    model.model.norm = Mixing(model.model.norm)
    with pytest.raises(ModelLoadError, match="gives a sequence other states when another one is beside it"):
        trainer(model)
