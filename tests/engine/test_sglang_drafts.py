"""A server that drafts with a layer of the policy loads it, and the policy the rest, out of one request."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.bucket_files import write_bucket
from agentrl.engine.sglang.transports.cuda_ipc import request_of
from agentrl.engine.sglang.transports.inside import ahead_of
from agentrl.errors import EngineError
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import manifest_of, pack_buckets
from tests.engine.devices import packed_of
from tests.engine.test_sglang_inside import FILE, call, crcs, listed


class Layer(NamedTuple):
    """Of a policy, that a server drafts with: what its names begin with, there and in the draft.

    beside: what the draft has beside a layer of the policy; projection: the matrix among it.
    """

    begin: str
    block: str
    beside: tuple[str, ...]
    projection: str


LAYERS = {
    "deepseek": Layer(
        "model.layers.2.", "model.decoder.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "eh_proj"
    ),
    "mimo": Layer(
        "model.mtp_layers.0.",
        "model.mtp_block.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "input_proj",
    ),
}
DEEPSEEK = LAYERS["deepseek"]


class Named(nn.Module):
    """Parameters by SGLang's names, that loads as SGLang does: what belongs to another model is left out."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(torch.zeros(3, 2), requires_grad=False) for name in names}
        self.seen: list[str] = []

    def named_parameters(self, *_: object, **__: object):
        return iter(self.held.items())

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.seen.append(name)
            self.held[self.own_name(name)].copy_(tensor)

    def own_name(self, name: str) -> str:
        return name


class Draft(Named):
    """As DeepseekV3ForCausalLMNextN and MiMoMTP name them."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        super().__init__(*(self.own_name(f"{layer.begin}{below}") for below in below_of(layer)))

    def own_name(self, name: str) -> str:
        below = name.removeprefix(self.layer.begin)
        return f"model.{below}" if below.startswith(self.layer.beside) else f"{self.layer.block}{below}"


def below_of(layer: Layer) -> list[str]:
    return [f"{below}.weight" for below in (layer.beside[0], layer.projection, "mlp.gate")]


def models(layer: Layer = DEEPSEEK) -> tuple[Draft, Named]:
    """In the order in which SGLang has them load."""
    return Draft(layer), Named(
        "model.embed_tokens.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"
    )


def weights(seed: int, layer: Layer = DEEPSEEK) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    names = (
        *("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"),
        *(f"{layer.begin}{below}" for below in below_of(layer)),
    )
    return [(name, torch.randn(3, 2, generator=generator)) for name in names]


def request(folder: Path, action: str, sent) -> dict:
    """What a transport asks for."""
    ahead = ahead_of(manifest_of(sent))
    if action == "load_device":
        packed = packed_of(sent)
        return {**request_of(packed.weights, is_whole=True), "keeps": packed}
    (bucket,) = pack_buckets(sent, 1 << 20)
    tensors = write_bucket(folder / FILE, 0, [bucket])
    if action == "load_all":
        return {"action": action, "files": [[str(folder / FILE), tensors]], "ahead": ahead}
    whole = action == "load"
    return {
        "action": "load",
        "file": str(folder / FILE),
        "tensors": tensors,
        "whole": whole,
        "ahead": ahead,
    }


def called(folder: Path, draft: Draft, policy: Named, **message: object) -> dict:
    """Both get it, one after the other; what the last leaves in the reply."""
    folder.mkdir()
    message.pop("keeps", None)
    call(folder, draft, **message)
    return dict(call(folder, policy, **message))


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("action", ["load_all", "load_device", "load", "load a shard"])
def test_each_model_takes_what_it_holds_and_is_compared(tmp_path, action, family):
    layer = LAYERS[family]
    draft, policy = models(layer)
    for seed in (1, 2):
        sent = weights(seed, layer)
        message = request(tmp_path, action, sent)
        reply = called(tmp_path / f"{action}{seed}", draft, policy, **message)
        assert reply["error"] is None
        # Ranks that hold shards report all that they received.
        assert reply["tensors"] == (crcs(sent) if action == "load a shard" else {})
        for name, tensor in sent:
            model = draft if name.startswith(layer.begin) else policy
            assert torch.equal(model.held[model.own_name(name)], tensor), name
        asked = {"action": "read", "tensors": listed(sent), "ahead": ahead_of(manifest_of(sent))}
        assert called(tmp_path / f"read{seed}", draft, policy, **asked)["tensors"] == crcs(sent)
    assert not set(draft.seen) & set(policy.seen)


@pytest.mark.parametrize("action", ["load_all", "load_device"])
def test_an_error_of_either_is_the_servers(tmp_path, action):
    sent = weights(1)
    for number, model in enumerate(models()):
        both = list(models())
        del model.held[next(iter(model.held))]
        both[number] = model
        reply = called(tmp_path / str(number), *both, **request(tmp_path, action, sent))
        assert "has no tensor" in reply["error"], number


def test_a_server_that_does_not_draft_leaves_the_layer_out(tmp_path):
    _, policy = models()
    (tmp_path / "one").mkdir()
    message = request(tmp_path, "load_all", weights(1))
    assert call(tmp_path / "one", policy, **message) == {"error": None, "tensors": {}}


async def test_a_process_group_sends_no_layer_that_a_server_drafts_with():
    from agentrl.engine.sglang.transports.base import Delivery
    from agentrl.engine.sglang.transports.distributed import Distributed
    from agentrl.weights.snapshot import LocalSnapshot

    delivery = Delivery(1, LocalSnapshot([*pack_buckets(weights(1), 1 << 20)], 0))
    with pytest.raises(EngineError, match=r"update_weights_transport = disk, or leave enable_mtp_training"):
        await Distributed().send([], delivery)


@pytest.mark.parametrize("family", LAYERS)
def test_the_loader_is_told_of_the_layers_alone_that_have_a_projection(family):
    specs = [TensorSpec(name, (3, 2), "float32") for name, _ in weights(1, LAYERS[family])]
    assert ahead_of(specs) == [LAYERS[family].begin]
    assert ahead_of(specs[:3]) == []
    assert agentrl_sglang.PREFIX
