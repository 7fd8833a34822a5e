"""The memory of a run's processes is what they allocate; activations are near it."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.assembly.memory import Memory, Networks, embedded_memory, torch_memory
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels
from agentrl.trainer.torch.worker import TorchWorker
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


def allocated(worker: TorchWorker, networks) -> Memory:
    """Weights, gradients and optimizers of one step, added up over what torch holds."""
    gradients = []

    def note(optimizer, *_):
        gradients.extend(p.grad.nbytes for group in optimizer.param_groups for p in group["params"])

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
    return Memory(weights, sum(gradients), sum(states))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_torch_trainer_takes_what_the_formula_gives(kind, optimizer):
    config, model = settings(optimizer=optimizer), MODELS[kind]()
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), AuxiliaryModels())
    expected = torch_memory(Networks(model.config), config, tokens=16)
    assert allocated(worker, [model]) == expected._replace(activations=0)


def test_a_critic_and_a_reference_are_counted():
    config, model, reference = settings(), qwen3(torch.float32), llama(torch.float32)
    critic = critic_of(model)
    auxiliary = AuxiliaryModels(critic=critic, ref=reference)
    worker = TorchWorker(model, Learning(POLICY_LOSS, config, 10), auxiliary)
    expected = torch_memory(Networks(model.config, True, [reference.config]), config, tokens=16)
    assert allocated(worker, [model, critic.network, reference]) == expected._replace(activations=0)


@pytest.mark.parametrize(
    "make", [lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE)), lambda: LlamaForCausalLM(LlamaConfig(**WIDE))]
)
def test_the_estimate_of_activations_is_near_what_autograd_keeps(make):
    torch.manual_seed(0)
    model = make().float().eval()
    worker = TorchWorker(
        model, Learning(POLICY_LOSS, settings(max_tokens_per_gpu=192), 10), AuxiliaryModels()
    )
    storages: dict[int, int] = {}
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        worker.update(batch(masks=[[0] + [1] * 191]))
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    estimate = torch_memory(Networks(model.config), settings(), tokens=192).activations
    assert 0.8 < sum(storages.values()) / estimate < 1.25


def test_the_embedded_engines_cache_is_counted():
    model = qwen3(torch.float32)
    engine = EmbeddedEngine.from_model(model, max_slots=7, max_context_len=33)
    expected = embedded_memory(model.config, 7, 33)
    assert engine._decoder.num_bytes == expected.kv_cache
    assert expected.weights == sum(p.nbytes for p in model.parameters())
