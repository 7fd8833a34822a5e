"""Parameters that patterns freeze have no gradient and no state; the others learn as they would without."""

from __future__ import annotations

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.losses import ValueLoss
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels, Critic, critic_over
from agentrl.trainer.torch.frozen import freeze
from tests.trainer.families import FAMILIES, family
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, gradients_of, qwen3, settings, trainer

CASES = {
    "frozen": {"freeze_params_name_list": ["embed_tokens", r"layers\.0\."]},
    "chosen": {"only_train_params_name_list": ["norm"]},
    "both": {"only_train_params_name_list": [r"layers\.1"], "freeze_params_name_list": ["norm", "mlp"]},
}


def learns(case, name):
    """Without regular expressions."""
    match case:
        case "frozen":
            return "embed_tokens" not in name and "layers.0." not in name
        case "chosen":
            return "norm" in name
    return "layers.1." in name and "norm" not in name and "mlp" not in name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("case", CASES)
async def test_frozen_parameters_stay_and_the_others_learn_as_they_would_without(case, optimizer):
    models = [qwen3(torch.float32), qwen3(torch.float32)]
    before = {name: p.clone() for name, p in models[0].named_parameters()}
    options = {"optimizer": optimizer, "weight_decay": 0.1, "lr": 1e-2}
    gradients, learners = [], []
    for model, patterns in zip(models, ({}, CASES[case]), strict=True):
        learners.append(trainer(model, **options, **patterns))
        with gradients_of(model) as actual:
            await learners[-1].update(batch())
        gradients.append(actual)
    everything, chosen = gradients
    expected = {name for name in before if learns(case, name)}
    assert 0 < len(expected) < len(before)
    assert chosen.keys() == expected
    assert all(torch.equal(chosen[name], everything[name]) for name in expected)
    whole, part = (dict(model.named_parameters()) for model in models)
    for name, tensor in before.items():
        assert torch.equal(part[name], whole[name] if name in expected else tensor), name
    states = list(learners[1]._worker._policy.optimizer_tensors())
    sizes = sorted(part[name].numel() for name in expected)
    assert {tensor.numel() for tensor in states} <= {1, *sizes}
    assert all(p.grad is None for p in part.values())


async def test_a_critic_has_the_same_trunk_frozen_and_learns_its_head():
    options = {"only_train_params_name_list": ["mlp"], "lr": 1e-2}
    model = qwen3(torch.float32)
    freeze(model, settings(**options))
    critic = Critic(critic_over(model), Learning(ValueLoss(), settings(**options), 9))
    before = {name: p.clone() for name, p in critic.network.named_parameters()}
    learner = trainer(model, auxiliary=AuxiliaryModels(critic), **options)
    for _ in range(2):  # The first gradient of the trunk is 0, as the head is.
        await learner.update(with_returns(batch()))
    moved = {name for name, p in critic.network.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "mlp" in name} | {"lm_head.weight"}


@pytest.mark.parametrize("name", FAMILIES)
async def test_every_family_learns_the_rest(name):
    """A layer that is frozen passes the gradient on."""
    model = family(name).float()
    first, *_, last = [key for key, p in model.named_parameters() if p.ndim == 2]
    chosen = [key.replace(".", r"\.") for key in (first, last)]
    with gradients_of(model) as actual:
        await trainer(model, only_train_params_name_list=chosen).update(batch())
    assert {first, last} <= actual.keys()
    assert all(float(gradient.abs().max()) > 0 for gradient in actual.values())


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (
            {"freeze_params_name_list": ["embed", "expert"]},
            "`expert` is in the name of no parameter",
        ),
        ({"only_train_params_name_list": ["lm_head"]}, "they are named as model.embed"),
        ({"freeze_params_name_list": ["."]}, "leaves nothing of Qwen3ForCausalLM to learn"),
    ],
)
def test_a_pattern_without_a_parameter_and_nothing_to_learn_are_one_sentence(patterns, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trainer(qwen3(), **patterns)
