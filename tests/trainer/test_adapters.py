"""Adapters learn in place of the weights; who gets the weights gets them with the adapters added."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigError, ModelLoadError
from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels, Critic, critic_over, worker
from agentrl.trainer.torch.adapters import adapt, merged_weights
from agentrl.trainer.torch.plan import TorchPlan
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import named_weights, unpack
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.loading import open_directory
from tests.trainer.families import FAMILIES, family
from tests.trainer.test_torch_trainer import Recorder
from tests.trainer.tiny import batch, gradients_of, qwen3, reference_gradient, settings, tokenizer, trainer

LORA = {"lora_rank": 3, "lora_alpha": 6}


def moved(model):
    """Adapters as they are after they have learned: B begins as 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


def merged_of(name_or_model):
    """A model of its own with the weights that are published."""
    model = name_or_model
    state = {name: tensor.contiguous() for name, tensor in merged_weights(model)}
    return type(model).from_pretrained(
        None, config=deepcopy(model.config), state_dict=state, dtype=model.dtype
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_published_is_the_model_that_is_trained(name):
    model, ids = family(name), torch.arange(12)[None] % 13
    plain = dict(named_weights(model))
    with torch.no_grad():
        before = model(ids).logits
        # B is 0 at first.
        adapted = adapt(model, settings(**LORA))
        assert torch.equal(adapted(ids).logits, before)
        after = moved(adapted)(ids).logits
        assert float((after - before).abs().max()) > 1e-3
        torch.testing.assert_close(merged_of(adapted).eval()(ids).logits, after, rtol=1e-4, atol=1e-4)
    published = {name: (tuple(t.shape), t.dtype) for name, t in merged_weights(adapted)}
    assert published == {name: (tuple(t.shape), t.dtype) for name, t in plain.items()}
    learning = [key for key, p in model.named_parameters() if p.requires_grad]
    assert learning
    assert all(".lora_" in key for key in learning)


async def test_the_gradient_is_that_of_the_formula():
    """d/dA and d/dB of W + scale B A, from the gradient of the merged W, written down in another way."""
    model, train_batch = moved(adapt(qwen3(), settings(**LORA))), batch()
    whole = merged_of(model).eval()
    _, expected = reference_gradient(whole, train_batch, imitation=False)
    state, scale = {name: p.clone() for name, p in model.state_dict().items()}, 6 / 3
    with gradients_of(model) as actual:
        await trainer(model, PolicyLoss(), max_tokens_per_gpu=20, **LORA).update(train_batch)
    assert len(actual) == 2 * 2 * 7
    for name, gradient in actual.items():
        own = name.partition(".lora_")[0]
        a, b = (state[f"{own}.lora_{which}.default.weight"] for which in "AB")
        of_weight = expected[f"{own}.weight"]
        formula = scale * of_weight @ a.T if ".lora_B." in name else scale * b.T @ of_weight
        torch.testing.assert_close(gradient, formula, rtol=1e-7, atol=1e-9, msg=name)


async def test_only_adapters_move_and_the_reference_is_the_network_without_them():
    model, train_batch = qwen3(torch.float32), batch()
    frozen = {name: p.clone() for name, p in model.named_parameters()}
    learner = trainer(model, lr=1e-2, **LORA)
    first = await learner.score(train_batch.samples, ("old", "ref"))
    assert all(map(np.array_equal, first.proximal, first.ref))
    for _ in range(3):
        await learner.update(train_batch)
    scores = await learner.score(train_batch.samples, ("old", "ref"))
    assert all(map(np.array_equal, scores.ref, first.ref))
    assert any(
        np.abs(new - old).max() > 1e-3 for new, old in zip(scores.proximal, first.proximal, strict=True)
    )
    state = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}
    assert all(torch.equal(state[name], p) for name, p in frozen.items())
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


async def test_a_sink_gets_the_weights_with_the_adapters():
    model, sink = qwen3(torch.float32), Recorder()
    learner = trainer(model, lr=1e-2, **LORA)
    await learner.update(batch())
    await learner.publish(sink, version=1)
    arrived = {name: tensor for bucket in sink.buckets for name, tensor in unpack(bucket)}
    whole = dict(merged_of(model).named_parameters())
    assert sorted(arrived) == sorted(whole) == sorted(spec.name for spec in sink.manifest)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in whole.items())
    assert all(isinstance(spec, TensorSpec) for spec in sink.manifest)


@pytest.mark.parametrize("name", FAMILIES)
async def test_peft_loads_the_adapters_that_are_saved(name, tmp_path):
    save_model(family(name).float(), tokenizer(), str(tmp_path / "base"))
    model, ids = open_directory(tmp_path / "base", torch.float32).eval(), torch.arange(12)[None] % 13
    learner = trainer(model, **LORA)
    await learner.save(str(tmp_path / "saved"))
    moved(model)
    await learner.save(str(tmp_path / "saved"))
    assert not list((tmp_path / "saved").glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    merged = open_directory(tmp_path / "saved", torch.float32).eval()
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(by_peft(ids).logits, expected)
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)


async def test_adapters_of_adapters_are_saved_for_the_first_base_model(tmp_path):
    save_model(qwen3(torch.float32), tokenizer(), str(tmp_path / "base"))
    for number in range(2):
        model = open_directory(tmp_path / ("saved" if number else "base"), torch.float32)
        learner = trainer(model, **{**LORA, "lora_rank": 2 + number})
        await learner.save(str(tmp_path / "before"))
        moved(model)
        await learner.save(str(tmp_path / "saved"))
    found = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), tmp_path / "saved"
    )
    assert (found.peft_config["default"].r, found.peft_config["default"].lora_alpha) == (5, 5)
    ids = torch.arange(12)[None] % 13
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)


async def test_a_saved_state_goes_on_bit_for_bit(tmp_path):
    straight, halves = qwen3(torch.float32), qwen3(torch.float32)
    first, train_batch = trainer(straight, lr=1e-2, **LORA), batch()
    torch.manual_seed(1)
    second = trainer(halves, lr=1e-2, **LORA)
    await first.update(train_batch)
    await (await first.save_state(str(tmp_path / "state")))
    await second.load_state(str(tmp_path / "state"))
    for learner in (first, second):
        await learner.update(train_batch)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), halves.parameters(), strict=True))


async def saved(model, folder, **changes):
    """The state of a trainer after a step, as torch reads it."""
    learner = trainer(model, lr=1e-2, **changes)
    await learner.update(batch())
    await (await learner.save_state(str(folder)))
    return torch.load(folder / "policy" / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    "changes", [LORA, {**LORA, "bf16": True}, {"freeze_params_name_list": ["embed_tokens", "mlp"]}], ids=str
)
async def test_a_state_holds_what_learns_alone(changes, tmp_path):
    state = await saved(model := qwen3(torch.float32), tmp_path, **changes)
    assert set(state["network"]) == {name for name, p in model.named_parameters() if p.requires_grad}
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(tensor.numel() for tensor in state["network"].values()) == learning
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state["network"].items())


async def test_a_state_of_another_base_model_is_refused(tmp_path):
    await saved(qwen3(torch.float32), tmp_path, **LORA)
    other = qwen3(torch.float32)
    with torch.no_grad():
        next(other.parameters())[3, 2] += 1e-3
    with pytest.raises(ModelLoadError, match="what does not learn is of another model; put that one back"):
        await trainer(other, **LORA).load_state(str(tmp_path))


async def test_a_state_knows_its_base_model_in_whatever_memory_it_is(tmp_path):
    """In bfloat16, or in fp32."""
    model = qwen3(torch.float32).to(torch.bfloat16).float()
    await saved(model, tmp_path, **LORA, bf16=True)
    whole = qwen3(torch.float32).to(torch.bfloat16).float()
    await trainer(whole, **LORA).load_state(str(tmp_path))
    learned, loaded = (adapter_tensors(each) for each in (model, whole))
    assert all(map(torch.equal, learned, loaded))


def adapter_tensors(model):
    return [tensor for name, tensor in model.state_dict().items() if ".lora_" in name]


async def test_a_critic_of_an_adapted_policy_learns_its_head_and_its_adapters():
    model = adapt(qwen3(torch.float32), settings(**LORA))
    critic = Critic(critic_over(model), Learning(ValueLoss(), settings(lr=1e-2, **LORA), 9))
    learning = {name for name, p in critic.network.named_parameters() if p.requires_grad}
    assert "lm_head.weight" in learning
    assert all(".lora_" in name or name == "lm_head.weight" for name in learning)
    learner = trainer(model, auxiliary=AuxiliaryModels(critic), **LORA)
    train_batch = batch()
    scores = await learner.score(train_batch.samples, ("values",))
    returns = tuple(np.ones(len(s), np.float32) for s in train_batch.samples)
    credit = replace(train_batch.credit, returns=returns)
    await learner.update(
        replace(train_batch, scores=replace(train_batch.scores, values=scores.values), credit=credit)
    )
    after = await learner.score(train_batch.samples, ("values",))
    assert any(np.abs(v).max() > 0 for v in after.values)


def test_a_name_of_no_layer_is_refused_in_a_sentence():
    with pytest.raises(
        ConfigError, match=r"names query, which Qwen3ForCausalLM cannot adapt; choose .*q_proj"
    ):
        trainer(qwen3(), **LORA, lora_target_modules="q_proj, query")


def test_chosen_matrices_alone_get_adapters():
    model = adapt(qwen3(), settings(**LORA, lora_target_modules="q_proj,v_proj"))
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_a_plan_opens_no_reference_that_is_the_policy_without_its_adapters():
    learning = Learning(PolicyLoss(), settings(**LORA), 1)
    same = TorchPlan(policy=learning, models={"old": "a", "ref": "a"})
    assert same.opened == {"old"}
    assert same.roles == {"old", "ref"}
    assert TorchPlan(policy=learning, models={"old": "a", "ref": "b"}).opened == {"old", "ref"}
    full = Learning(PolicyLoss(), settings(), 1)
    assert TorchPlan(policy=full, models={"old": "a", "ref": "a"}).opened == {"old", "ref"}


async def test_networks_that_are_offloaded_learn_bit_for_bit_as_ones_that_are_not(monkeypatch):
    """Policy and reference share their memory."""
    scored = []
    for offloads in (False, True):
        monkeypatch.setattr(worker, "has_own_memory", lambda device, offloads=offloads: offloads)
        model, train_batch = qwen3(torch.float32), batch()
        learner = trainer(model, lr=1e-2, **LORA)
        for _ in range(2):
            await learner.onload()
            scores = await learner.score(train_batch.samples, ("old", "ref"))
            await learner.update(replace(train_batch, scores=scores))
            await learner.offload()
            assert any(p.untyped_storage().nbytes() for p in model.parameters()) is not offloads
        scored.append(await learner.score(train_batch.samples, ("old", "ref")))
    for role in ("proximal", "ref"):
        pairs = zip(*(getattr(scores, role) for scores in scored), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
