"""The memory of a run's processes is what they allocate; activations are near it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.assembly import memory as module
from agentrl.assembly.cards import networks_of, server_memory
from agentrl.assembly.load import load_config
from agentrl.assembly.memory import (
    MemoryNeed,
    Networks,
    cache_bytes,
    check_machine,
    embedded_memory,
    learned_memory,
    torch_memory,
)
from agentrl.assembly.model import fresh_parameters, fresh_source
from agentrl.assembly.policy import check_cache
from agentrl.assembly.sections import ModelSection
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.envs import Chat
from agentrl.errors import ConfigError
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels
from agentrl.trainer.torch.frozen import freeze
from agentrl.trainer.torch.worker import TorchWorker
from agentrl.weights.hf.tensors import num_parameters
from tests.sizes import DEEPSEEK_V3, QWEN3_30B_A3B, opened
from tests.trainer.families import FAMILIES
from tests.trainer.test_roles import critic_of, with_returns
from tests.trainer.tiny import POLICY_LOSS, batch, llama, qwen3, settings

MODELS = {
    "qwen3, tied": lambda: qwen3(torch.float32),
    "qwen3": lambda: qwen3(torch.float32, tied=False),
    "llama": lambda: llama(torch.float32),
}
WIDE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": None,
}


def allocated(worker: TorchWorker, networks) -> MemoryNeed:
    """Weights, gradients and optimizers of one step, added up over what torch holds.

    Gradients are those of one network: they are gone when the next one learns.
    """
    gradients = {}

    def note(optimizer, *_):
        gradients.update({p: p.grad.nbytes for group in optimizer.param_groups for p in group["params"]})

    handle = register_optimizer_step_pre_hook(note)
    try:
        worker.update(with_returns(batch()))
    finally:
        handle.remove()
    states = [
        tensor.nbytes
        for learner in worker._learners().values()
        for part in learner._optimizer.parts
        for state in part.state.values()
        for tensor in state.values()
    ]
    weights = sum(p.nbytes for network in networks for p in network.parameters())
    of_each = [sum(gradients.get(p, 0) for p in network.parameters()) for network in networks]
    return MemoryNeed(weights, max(of_each), sum(states))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_torch_trainer_takes_what_the_formula_gives(kind, optimizer):
    config, model = settings(optimizer=optimizer), MODELS[kind]()
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), AuxiliaryModels())
    expected = torch_memory(Networks(model.config), config, tokens=16)
    assert allocated(worker, [model]) == expected.known


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adapters_take_what_the_formula_gives(optimizer):
    config, model = settings(optimizer=optimizer, lora_rank=2), qwen3(torch.float32)
    expected = torch_memory(Networks(model.config), config, tokens=16)
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), AuxiliaryModels())
    assert allocated(worker, [model]) == expected.known


def test_matrices_below_adapters_take_half_where_they_come_in_half():
    config, model = settings(bf16=True, lora_rank=2), qwen3(torch.float32)
    judge = qwen3(torch.float32, tied=False)
    for network in (model, judge):
        network.to(torch.bfloat16).float()
        network.config.dtype = torch.bfloat16
    memory = torch_memory(Networks(model.config, frozen=[judge.config]), config, tokens=16)
    whole = torch_memory(Networks(qwen3(torch.float32).config), config, tokens=16)
    assert memory.weights < whole.weights + num_parameters(judge.config) * 4
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), AuxiliaryModels(teacher=judge))
    assert allocated(worker, [model, judge]) == memory.known


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_take_their_weights_alone(optimizer):
    patterns = {"only_train_params_name_list": ["layers", "embed"], "freeze_params_name_list": ["0.mlp"]}
    config, model = settings(optimizer=optimizer, **patterns), qwen3(torch.float32)
    expected = torch_memory(Networks(model.config, has_critic=True), config, tokens=16)
    freeze(model, config)
    critic = critic_of(model, optimizer=optimizer)
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), AuxiliaryModels(critic=critic))
    assert allocated(worker, [model, critic.network]) == expected.known


def test_the_reference_of_adapters_is_no_second_network():
    policy, penalty = qwen3(torch.float32).config, {"use_kl_loss": True, "kl_loss_coef": 0.1}
    counted = [networks_of(load_config(None, {**penalty, **more}), policy) for more in ({}, {"lora_rank": 2})]
    assert [len(networks.frozen) for networks in counted] == [1, 0]


def test_a_critic_and_a_reference_are_counted():
    config, model, reference = settings(), qwen3(torch.float32), llama(torch.float32)
    critic = critic_of(model)
    auxiliary = AuxiliaryModels(critic=critic, ref=reference)
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), auxiliary)
    expected = torch_memory(Networks(model.config, True, [reference.config]), config, tokens=16)
    assert allocated(worker, [model, critic.network, reference]) == expected.known


def measured(update: Callable[[], object], trace: Path) -> int:
    """The most memory that torch's allocator has given out at once while a function ran (bytes)."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        update()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in events))


WAYS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "recomputed": {"gradient_checkpointing": True},
    "bf16, recomputed": {"bf16": True, "gradient_checkpointing": True},
    "adapters": {"bf16": True, "lora_rank": 4},
    "adapters, recomputed": {"bf16": True, "lora_rank": 4, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "falcon_h1"])
def test_a_step_takes_what_was_counted_for_it(name, way, tmp_path):
    config, tokens = settings(max_tokens_per_gpu=384, **WAYS[way]), 384
    kind, changes = FAMILIES[name]
    torch.manual_seed(0)
    shape = {**WIDE, **changes, "layer_types": None} if name == "gemma2" else {**WIDE, **changes}
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**shape), dtype=torch.float32)
    expected = torch_memory(Networks(model.config), config, tokens)
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), AuxiliaryModels())
    rows = batch(masks=[[0] + [1] * (tokens - 1)] * 2)
    # The optimizer's state comes with the first step.
    worker.update(rows)
    peak = measured(lambda: worker.update(rows), tmp_path / "trace.json")
    assert expected.gradients + expected.activations == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedded_engines_cache_is_counted(dtype):
    model = qwen3(dtype)
    engine = EmbeddedEngine.from_model(model, max_slots=7, max_context_len=33)
    expected = embedded_memory(model.config, 7, 33, dtype)
    assert engine.memory.cache_bytes == expected.kv_cache
    assert expected.weights == sum(p.nbytes for p in model.parameters())


def test_servers_keep_the_small_state_of_latent_attention_and_otherwise_keys_and_values():
    deepseek, qwen = opened(DEEPSEEK_V3), opened(QWEN3_30B_A3B)
    # 512 channels that all heads are made of, and 64 with positions, in two bytes, on each GPU.
    assert [cache_bytes(deepseek, gpus) for gpus in (1, 8, 64)] == [61 * 576 * 2] * 3
    # Four heads of 128; eight GPUs have each head twice.
    assert [cache_bytes(qwen, gpus) for gpus in (1, 4, 8)] == [48 * 2 * 4 * 128 * 2 // n for n in (1, 4, 4)]


def test_a_server_of_experts_shares_its_weights_but_for_copies_of_attention():
    deepseek = opened(DEEPSEEK_V3)
    plain, copied = (server_memory(deepseek, 64, 256, 0, copies).weights for copies in (1, 8))
    assert plain == 2 * num_parameters(deepseek) // 64
    # Of each layer, by the sizes of arXiv:2412.19437.
    queries, keys = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 512 * 128 * 256
    attention = 61 * (queries + keys + 128 * 128 * 7168 + 1536 + 512)
    assert copied - plain == pytest.approx(2 * 7 * attention / 64, abs=64)


SHAPES = (
    {},
    {"num_layers": 1, "hidden_size": 96, "ffn_hidden_size": 70, "num_attention_heads": 6, "kv_channels": 8},
    {"num_layers": 5, "num_attention_heads": 4, "num_query_groups": 1, "vocab_size": 300},
)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_parameters_of_a_fresh_model_are_known_before_it_is_made(shape, tmp_path):
    section = ModelSection(**shape)
    source = fresh_source(section, None, Chat(), seed=0, folder=tmp_path / "model", corpus=["a b c"])
    assert fresh_parameters(section, source.vocab_size) == num_parameters(source.config)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"hidden_size": 10**12}, "hidden_size = 1000000000000"),
        ({"hidden_size": 10**30}, "hidden_size = 1000000000000000000000000000000"),
        ({"num_layers": 10**9}, "num_layers = 1000000000"),
    ],
)
def test_a_fresh_model_that_cannot_fit_is_refused_before_anything_is_made(shape, text, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"{text}.* asks for \d+ TB of weights, and this machine has .* GB; lower"
    ):
        fresh_source(ModelSection(**shape), None, Chat(), seed=0, folder=tmp_path / "model", corpus=["a"])
    assert list(tmp_path.iterdir()) == []


def test_slots_that_cannot_fit_are_refused_with_the_memory_that_they_ask_for():
    config = Qwen3Config(**WIDE)
    # Keys and values of 4 layers, 2 heads of 32 numbers, in 4 bytes, of 128 tokens and one more.
    cache_tb = 4 * 2 * 2 * 32 * 4 * 129 * 10**8 / 10**12
    with pytest.raises(ConfigError) as refused:
        check_cache(config, 10**8, 128)
    assert "max_slots = 100,000,000, each of 128 tokens, asks for " in str(refused.value)
    assert f"and {cache_tb:.1f} TB of kv cache, and this machine has " in str(refused.value)
    assert str(refused.value).endswith("lower max_slots or max_context_len, or take a smaller model.")
    check_cache(config, 256, 128)


def test_the_trainer_of_a_model_is_counted_whole(monkeypatch):
    config = Qwen3Config(**WIDE)
    memory = learned_memory(config, settings())
    assert memory == torch_memory(Networks(config), settings(), tokens=16).known
    monkeypatch.setattr(module, "machine_memory", lambda: memory.exact)
    check_machine("the trainer", memory._replace(activations=10**9), "wait")
    monkeypatch.setattr(module, "machine_memory", lambda: memory.exact - 1)
    with pytest.raises(
        ConfigError, match=r"the trainer asks for .* of weights and .* of gradients and .*; wait\."
    ):
        check_machine("the trainer", memory, "wait")
