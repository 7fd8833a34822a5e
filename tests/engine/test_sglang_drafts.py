"""A server that drafts with a layer of the policy loads it, and the policy the rest, out of one request."""

from __future__ import annotations

from pathlib import Path

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

LAYER = "model.layers.2."
BESIDE = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


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
    """As DeepseekV3ForCausalLMNextN names them."""

    def own_name(self, name: str) -> str:
        below = name.removeprefix(LAYER)
        return f"model.{below}" if below.startswith(BESIDE) else f"model.decoder.{below}"


def models() -> tuple[Draft, Named]:
    """In the order in which SGLang has them load."""
    draft = Draft("model.enorm.weight", "model.eh_proj.weight", "model.decoder.mlp.gate.weight")
    return draft, Named("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight")


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    names = (
        *("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"),
        *(f"{LAYER}{below}.weight" for below in ("enorm", "eh_proj", "mlp.gate")),
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


@pytest.mark.parametrize("action", ["load_all", "load_device", "load", "load a shard"])
def test_each_model_takes_what_it_holds_and_is_compared(tmp_path, action):
    draft, policy = models()
    for seed in (1, 2):
        sent = weights(seed)
        message = request(tmp_path, action, sent)
        reply = called(tmp_path / f"{action}{seed}", draft, policy, **message)
        assert reply["error"] is None
        # Ranks that hold shards report all that they received.
        assert reply["tensors"] == (crcs(sent) if action == "load a shard" else {})
        for name, tensor in sent:
            model = draft if name.startswith(LAYER) else policy
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


def test_the_loader_is_told_of_the_layers_alone_that_have_a_projection():
    specs = [TensorSpec(name, (3, 2), "float32") for name, _ in weights(1)]
    assert ahead_of(specs) == [LAYER]
    assert ahead_of(specs[:3]) == []
    assert agentrl_sglang.PREFIX
