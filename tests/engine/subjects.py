"""The engines under test, each with an independent reference for its model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.engine.conformance import EngineCaps, Subject, WeightVersion
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.fake import FakeEngine, seeded_table
from agentrl.engine.sglang import SGLangPolicy
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, named_weights, pack_buckets
from tests.trainer.families import family

torch.set_num_threads(1)

VOCAB = 61


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(ord("0") + i) for i in ids)


def tiny(architecture: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model, with weights so large that the probabilities of tokens differ clearly."""
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "qwen3":
            model: PreTrainedModel = Qwen3ForCausalLM(
                Qwen3Config(**sizes | {"head_dim": 16, "tie_word_embeddings": True} | changes)
            )
        elif architecture == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**sizes | {"tie_word_embeddings": True} | changes))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes | {"tie_word_embeddings": False} | changes))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model.eval()


def delivery_of(model: PreTrainedModel) -> WeightVersion:
    tensors = list(named_weights(model))
    return WeightVersion(manifest_of(tensors), list(pack_buckets(tensors, 8_000)), checksum(tensors))


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    rows: npt.NDArray[np.float32] = model(torch.tensor([list(ids)])).logits[0].float().numpy()
    return rows


def embedded_subject(architecture: str, deterministic: bool = False) -> Subject:
    return subject_of([tiny(architecture, seed) for seed in (0, 1)], deterministic)


def family_subject(name: str, deterministic: bool = False) -> Subject:
    """A family that the decoder has no table of."""
    return subject_of([family(name, vocab=VOCAB, seed=seed).float() for seed in (0, 1)], deterministic)


def subject_of(models: Sequence[PreTrainedModel], deterministic: bool) -> Subject:
    """The embedded engine over the first of two models; the second is its version 1."""
    engine = EmbeddedEngine.from_model(
        models[0], max_slots=4, max_context_len=64, decode=text_of, deterministic=deterministic
    )
    return Subject(
        engine=engine,
        caps=EngineCaps(),
        vocab_size=VOCAB,
        max_slots=4,
        max_context_len=64,
        logits=lambda ids, version: logits_of(models[version], ids),
        delivery=lambda version: delivery_of(models[version]),
        decode=text_of,
        sink=engine.sink,
    )


HTTP_CAPS = EngineCaps(private_caches=False, weight_updates=False, releases_memory=False)
"""Over HTTP no session is closed, and the policy has no sink."""

# The router drops a field that SGLang does not know.
ROUTED_CAPS = replace(HTTP_CAPS, kept_ids=False, kept_ids_of_top_p=False)
SGLANG_CAPS = replace(HTTP_CAPS, seeds=False, kept_ids_of_top_p=False)
"""SGLang samples without regard to seeds, reports k likeliest tokens at most, and has one cache for all."""


def remote_subject(url: str, caps: EngineCaps, max_context_len: int, *, adaptive: bool = False) -> Subject:
    """The server of `tiny("qwen3")` at an address, with its own policy."""
    model = tiny("qwen3")
    return Subject(
        engine=SGLangPolicy(url, adaptive=adaptive, vocab_size=VOCAB, decode=text_of),
        caps=caps,
        vocab_size=VOCAB,
        max_slots=4,
        max_context_len=max_context_len,
        logits=lambda ids, version: logits_of(model, ids),
        delivery=lambda version: delivery_of(model),
        decode=text_of,
        tolerance=2e-5,
    )


def fake_subject(caps: EngineCaps | None = None, engine: FakeEngine | None = None) -> Subject:
    tables = [seeded_table(VOCAB, seed) for seed in (0, 1)]

    def delivery(version: int) -> WeightVersion:
        tensors = [("table", torch.from_numpy(tables[version].copy()))]
        return WeightVersion(manifest_of(tensors), list(pack_buckets(tensors, 1 << 20)), checksum(tensors))

    engine = engine or FakeEngine(vocab_size=VOCAB, max_slots=4, max_context_len=64, decode=text_of)
    return Subject(
        engine=engine,
        caps=caps or EngineCaps(),
        vocab_size=VOCAB,
        max_slots=4,
        max_context_len=64,
        logits=lambda ids, version: tables[version][list(ids)],
        delivery=delivery,
        decode=text_of,
        sink=engine.sink,
    )
