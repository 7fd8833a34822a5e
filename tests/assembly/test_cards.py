"""A rank and a server on one GPU: what each takes, and what SGLang makes of the arguments that it gets."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from agentrl.assembly import cluster
from agentrl.assembly.cards import CONTEXT_BYTES, server_memory, shared_card
from agentrl.assembly.config import RunConfig
from agentrl.errors import ConfigError
from tests.records.test_gpu_memory import GIB, driver

SMALL = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
"""The shape of Qwen3-0.6B."""
# Of a layer: q and o of 2048, k and v of 1024, three matrices of 3072, and norms.
LAYER = 1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
PARAMETERS = 151_936 * 1024 + 28 * LAYER + 1024
TOKEN = 28 * 2 * 8 * 128 * 2
"""Keys and values of a token in bfloat16 (bytes)."""
TRAINER = {"trainer": "megatron", "bf16": True, "max_tokens_per_gpu": 8192}


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    driver(tmp_path, monkeypatch, total_gib=80)
    monkeypatch.setattr(cluster, "num_gpus", lambda: 1)


def config_of(trainer=(), engine=(), **sections):
    return RunConfig.model_validate(
        {
            "env": {"env": "tests.flow.worlds:Bandit"},
            "engine": {"engine": "sglang", "rollout_num_gpus_per_engine": 1, **dict(engine)},
            "trainer": {**TRAINER, **dict(trainer)},
            "warm_start": {"warm_start_steps": 0},
            **sections,
        }
    )


def sglangs_cache(arguments, weights, free_before, taken_between=0):
    """The tokens of SGLang's cache, by its own rule (`_profile_available_bytes`)."""
    free_after = free_before - weights - taken_between
    rest = free_after - free_before * (1 - arguments["mem_fraction_static"])
    return min(int(rest // TOKEN), arguments["max_total_tokens"])


@pytest.mark.usefixtures("gpu")
def test_both_sides_are_what_the_shape_says_and_fit_together():
    card = shared_card(config_of(), SMALL, 4096, 256)
    # With bf16 Megatron holds a weight in 2 bytes, its gradient in 4, and in 12 what AdamW needs.
    assert card.rank.weights == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert card.rank.gradients == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert card.rank.optimizer == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert card.server.weights == 2 * PARAMETERS
    assert card.server.kv_cache == card.tokens * TOKEN
    assert card.rank.runtime == CONTEXT_BYTES
    assert card.arguments["max_total_tokens"] == card.tokens
    assert 0.93 * 80 * GIB < card.peak <= 0.95 * 80 * GIB
    # Rows of 8,192 tokens, which measured 34 GiB on a card, leave a server about half of 80.
    assert 25 * GIB < card.rank.total < 40 * GIB
    assert card.server.kv_cache > 30 * GIB


@pytest.mark.usefixtures("gpu")
def test_neither_the_order_of_starts_nor_a_restart_changes_the_cache():
    card = shared_card(config_of(), SMALL, 4096, 256)
    weights, empty = card.server.weights, card.total - CONTEXT_BYTES
    assert sglangs_cache(card.arguments, weights, empty) == card.tokens
    restarted = empty - card.rank.total
    assert sglangs_cache(card.arguments, weights, restarted) >= 0.998 * card.tokens
    # What a rank takes while the server starts costs at most a part of its cache.
    resting = card.rank.known.total
    assert sglangs_cache(card.arguments, weights, empty, resting) > 0.6 * card.tokens
    # Then both have room for all that they may still take.
    assert card.rank.total + card.server.total <= card.total


@pytest.mark.usefixtures("gpu")
def test_sides_that_take_turns_have_almost_all_of_the_gpu_each():
    together = shared_card(config_of(), SMALL, 4096, 256)
    turns = shared_card(config_of({"colocate": True}), SMALL, 4096, 256)
    # Side by side the rank keeps the version that is served, and the next one while it is sent.
    assert together.rank.published == 2 * together.server.weights
    assert turns.rank == together.rank._replace(published=0)
    gained = (turns.tokens - together.tokens) * TOKEN
    assert gained == pytest.approx(together.rank.total - CONTEXT_BYTES, abs=TOKEN)
    assert turns.peak <= turns.total
    # A side that keeps its memory in the other's turn leaves no more than one that never rests.
    kept = shared_card(config_of({"offload_rollout": True}), SMALL, 4096, 256)
    assert kept.tokens == together.tokens


@pytest.mark.usefixtures("gpu")
def test_what_the_user_sets_is_left_as_it_is_and_predicted():
    chosen = config_of(engine={"sglang": {"mem-fraction-static": 0.3}})
    card = shared_card(chosen, SMALL, 4096, 256)
    assert card.arguments == {}
    assert card.server.weights + card.server.kv_cache == pytest.approx(
        0.3 * (80 * GIB - CONTEXT_BYTES), rel=1e-3
    )
    tokens = shared_card(config_of(engine={"sglang": {"max_total_tokens": 5000}}), SMALL, 4096, 256).tokens
    assert tokens == 5000


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        ({"max_tokens_per_gpu": 65_536}, {}),
        ({"max_tokens_per_gpu": 65_536, "colocate": True}, {}),
        ({}, {"sglang": {"mem_fraction_static": 0.9}}),
        ({}, {"max_context_len": 10**7}),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_lower(trainer, engine):
    with pytest.raises(ConfigError, match=r"a rank takes up to .*activations.* the GPU has 85") as refused:
        shared_card(config_of(trainer, engine), SMALL, 4096, 256)
    sentence = str(refused.value)
    assert "lower max_tokens_per_gpu" in sentence
    assert ("colocate = true" in sentence) is ("colocate" not in trainer)


def test_without_a_gpu_there_is_nothing_to_share(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert shared_card(config_of(engine={"rollout_num_gpus_per_engine": 0}), SMALL, 4096, 256) is None


@pytest.mark.usefixtures("gpu")
def test_a_server_alone_on_its_gpu_is_left_to_sglang():
    assert shared_card(config_of({"trainer": "torch", "bf16": False}), SMALL, 4096, 256) is None


def test_more_gpus_of_a_server_share_its_cache_up_to_its_heads():
    caches = [server_memory(SMALL, number, 256, 1000).kv_cache for number in (1, 4, 16)]
    assert caches == [1000 * TOKEN, 1000 * TOKEN // 4, 1000 * TOKEN // 8]
