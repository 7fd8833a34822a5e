import math

import pytest
import torch
from pydantic import ValidationError

from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.plan import learning_rate
from agentrl.trainer.torch.learner import Optimizer, hidden_matrices
from tests.trainer.tiny import llama, qwen3


def rates(steps: int, total: int, **settings) -> list[float]:
    config = TrainerConfig(lr=1.0, **settings)
    return [learning_rate(config, step, total) for step in range(steps)]


def test_warm_up_counts_the_first_step_and_ends_at_the_peak():
    assert rates(6, 100, lr_warmup_iters=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(3, 100, lr_warmup_iters=0) == [1.0, 1.0, 1.0]


def test_linear_decay_falls_evenly_after_the_warm_up():
    assert rates(8, 6, lr_warmup_iters=2, lr_decay_style="linear") == pytest.approx(
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    )
    assert rates(7, 4, lr_warmup_iters=0, lr_decay_style="linear", min_lr=0.2) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    )


def test_cosine_decay_follows_a_half_wave():
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert rates(10, 8, lr_warmup_iters=0, lr_decay_style="cosine", min_lr=0.1) == pytest.approx(
        [*expected, 0.1, 0.1]
    )


def test_decay_iters_count_instead_of_all_steps():
    assert rates(5, 100, lr_warmup_iters=0, lr_decay_style="linear", lr_decay_iters=2) == [1.0, 0.5, 0, 0, 0]


def test_a_warm_up_longer_than_the_run_never_decays():
    assert rates(4, 2, lr_warmup_iters=4, lr_decay_style="cosine") == [0.25, 0.5, 0.75, 1.0]


def test_min_lr_above_lr_is_refused_in_a_sentence():
    with pytest.raises(ValidationError, match=r"min_lr \(0.5\) must not exceed lr \(0.1\)"):
        TrainerConfig(lr=0.1, min_lr=0.5)


@pytest.mark.parametrize("make", [qwen3, llama])
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(make):
    model = make()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = Optimizer(model, TrainerConfig(optimizer="muon"))
    adamw, muon = [
        {names[id(p)] for group in part.param_groups for p in group["params"]} for part in optimizer.parts
    ]
    assert [type(part) for part in optimizer.parts] == [torch.optim.AdamW, torch.optim.Muon]
    assert adamw | muon == set(names.values())
    assert not adamw & muon
    assert muon == {name for name in names.values() if "_proj.weight" in name}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= adamw
    assert len(muon) == len(hidden_matrices(model)) == 14


def test_adamw_alone_takes_everything_once():
    model = qwen3()
    (adamw,) = Optimizer(model, TrainerConfig()).parts
    updated = [id(p) for group in adamw.param_groups for p in group["params"]]
    assert sorted(updated) == sorted(id(p) for p in model.parameters())


def test_weight_decay_spares_what_has_one_dimension():
    (adamw,) = Optimizer(qwen3(), TrainerConfig(weight_decay=0.1)).parts
    for group in adamw.param_groups:
        assert {p.ndim for p in group["params"]} == ({2} if group["weight_decay"] else {1})
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]


def test_frozen_weights_are_left_out():
    model = qwen3()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    optimizer = Optimizer(model, TrainerConfig(optimizer="muon"))
    assert sum(len(g["params"]) for part in optimizer.parts for g in part.param_groups) == 23


def test_a_step_of_adamw_is_as_long_as_its_rate():
    model = qwen3()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, TrainerConfig(lr=1.0))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step(1e-3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] - 1e-3, rtol=0, atol=1e-9)


def test_a_step_of_muon_has_the_size_of_adamws():
    model = qwen3()
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    optimizer = Optimizer(model, TrainerConfig(optimizer="muon"))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1e-2)
    rms = (weight - before).square().mean().sqrt()
    assert 0.1e-2 < rms < 0.4e-2
