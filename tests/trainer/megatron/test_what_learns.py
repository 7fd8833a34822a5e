"""Muon over sharded matrices, and parameters that do not learn: as in the torch trainer, in every layout."""

from __future__ import annotations

import pytest
import torch

from agentrl.assembly.layout_memory import rank_memory
from agentrl.assembly.memory import Networks
from agentrl.errors import ConfigError
from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.families import VALUE_HEAD
from agentrl.trainer.megatron.model.shape import learning_of, shape_of
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch import AuxiliaryModels, Critic, critic_over
from agentrl.trainer.torch.frozen import freeze
from agentrl.trainer.torch.learner import hidden_matrices
from agentrl.trainer.torch.worker import TorchWorker
from agentrl.weights.codec import names_in_checkpoints
from agentrl.weights.hf.export import save_model
from tests.trainer.megatron.equality import Part, gradients_of, place, places_of_experts
from tests.trainer.megatron.models import CONFIGS, model_of
from tests.trainer.megatron.test_megatron_trainer import CRITIC, LAYOUTS, learns
from tests.trainer.megatron.together import Ranks
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, settings, tokenizer

MUON = {"optimizer": "muon", "clip_grad": 1e9}
WHOLE = {"use_distributed_optimizer": False}


def spread(layout: MegatronConfig, _rank: int, folder, changes, steps: int) -> list[Part]:
    """Runs in a rank: the weights of policy and critic after some steps, in place of gradients."""
    from agentrl.trainer.megatron.worker import MegatronWorker

    plan = MegatronPlan(
        layout=layout,
        policy=Learning(PolicyLoss(), learns(**changes), 6),
        models={"old": str(folder)},
        critic=Learning(CRITIC, learns(**changes, lr=3e-2), 6),
        critic_warmup=1,
    )
    worker = MegatronWorker(plan)
    for _ in range(steps):
        worker.update(with_returns(batch()))
    worker.onload()
    for memory in worker._memory.values():
        memory.onload()
    networks = [learner.passes.network for learner in worker._learners.values()]
    weights = [
        [(piece.placed.megatron, piece.parameter.detach().float().numpy()) for piece in network.pieces()]
        for network in networks
    ]
    return [Part(place(), places_of_experts(), [], mine, 0.0, {}) for mine in weights]


def both(ranks: Ranks, folder, kind, changes, *, steps=2, **sizes):
    """The weights before, and after some steps of the torch trainer and of the ranks; the critic's, too."""
    save_model(model_of(kind), tokenizer(), str(folder))
    model = model_of(kind)
    freeze(model, learns(**changes))
    critic = Critic(critic_over(model), Learning(CRITIC, learns(**changes, lr=3e-2), 6), warmup=1)
    plain = TorchWorker(model, Learning(PolicyLoss(), learns(**changes), 6), AuxiliaryModels(critic))
    before = weights_of(model, critic.network)
    for _ in range(steps):
        plain.update(with_returns(batch()))
    layout = MegatronConfig(actor_num_gpus_per_node=ranks.count, **sizes)
    parts = ranks.run(spread, layout, folder, changes, steps)
    shape = shape_of(model.config)
    ours = {
        f"{prefix} {'lm_head.weight' if name == VALUE_HEAD else name}": tensor
        for number, prefix, own in ((0, "policy", shape), (1, "critic", shape.of_a_critic))
        for name, tensor in gradients_of(kind, own, layout, [part[number] for part in parts]).items()
    }
    theirs = weights_of(model, critic.network)
    assert ours.keys() == theirs.keys()
    return before, theirs, ours


def weights_of(*models):
    return {
        f"{prefix} {name}": p.detach().clone()
        for prefix, model in zip(("policy", "critic"), models, strict=True)
        for name, p in model.named_parameters()
    }


def assert_moved_alike(names, before, plain, ours, error=0.15):
    """Where two sums of a gradient differ, so do Muon's updates, by the precision of bfloat16."""
    for name in names:
        change = (plain[name] - before[name]).norm()
        assert change > 1e-4
        assert (ours[name] - plain[name]).norm() < error * change, name


MUONS = {
    "one": ("single", "qwen3", {}),
    "TP2": ("pair", "qwen3", LAYOUTS["TP2"]),
    "DP2": ("pair", "glm4", LAYOUTS["DP2"]),
    "DP2, whole on every rank": ("pair", "qwen2", {**LAYOUTS["DP2"], **WHOLE}),
    "PP2, virtual": ("pair", "qwen3, tied", LAYOUTS["PP2, virtual"]),
    "CP2": ("pair", "llama", LAYOUTS["CP2"]),
    "TP2, glm4": ("pair", "glm4", LAYOUTS["TP2+SP"]),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", MUONS)
def test_muon_orthogonalizes_the_checkpoints_matrices(request, tmp_path, layout):
    ranks, kind, sizes = MUONS[layout]
    before, plain, ours = both(request.getfixturevalue(ranks), tmp_path, kind, MUON, **sizes)
    model = model_of(kind)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = [names[id(p)] for p in hidden_matrices(model)]
    assert len(hidden) == 4 * (6 if kind == "glm4" else 7)
    assert_moved_alike(
        [f"{who} {name}" for who in ("policy", "critic") for name in hidden], before, plain, ours
    )
    # What is added to all keys alike changes little: its gradient is mostly noise.
    rest = [name for name in before if name.split()[1] not in hidden and not name.endswith("k_proj.bias")]
    assert_moved_alike(rest, before, plain, ours)


FROZEN = {
    "an embedding and a layer": {"freeze_params_name_list": ["embed_tokens", r"layers\.0\."]},
    "all but the last norm": {"only_train_params_name_list": [r"model\.norm"]},
    "all but the first layer": {"only_train_params_name_list": [r"layers\.0\."]},
    "norms, muon": {**MUON, "freeze_params_name_list": ["norm", "mlp", "embed"]},
}
PLACES = {
    "TP2+SP": LAYOUTS["TP2+SP"],
    "PP2": LAYOUTS["PP2"],
    "PP2, virtual": LAYOUTS["PP2, virtual"],
    "DP2, computed again": {**LAYOUTS["DP2"], "recompute_granularity": "full"},
    "CP2, whole": {**LAYOUTS["CP2"], **WHOLE, "offload": True},
}
COVERED = [
    (place, case, "qwen3, tied" if number % 2 else "llama")
    for number, (place, case) in enumerate((p, c) for p in PLACES for c in FROZEN)
    if number % 3 != 2 or place == "PP2"
]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "case", "kind"), COVERED)
def test_what_is_frozen_stays_and_the_rest_learns_as_in_torch(pair, tmp_path, layout, case, kind):
    before, plain, ours = both(pair, tmp_path, kind, FROZEN[case], **PLACES[layout])
    moved = {name for name, tensor in before.items() if not torch.equal(ours[name], tensor)}
    assert moved == {name for name, tensor in before.items() if not torch.equal(plain[name], tensor)}
    assert 0 < len(moved) < len(before)
    assert_moved_alike(moved, before, plain, ours, 0.15 if "muon" in case else 0.01)


STEPPED = {
    "DP2, bf16": {**LAYOUTS["DP2"], "bf16": True},
    "DP2, whole on every rank, bf16": {**LAYOUTS["DP2"], **WHOLE, "bf16": True},
    "DP2": LAYOUTS["DP2"],
    "TP2, whole, networks that rest": {**LAYOUTS["TP2"], **WHOLE, "offload": True},
    "PP2, bf16, some frozen": {**LAYOUTS["PP2"], "bf16": True, "freeze_params_name_list": ["embed", "norm"]},
}


@pytest.mark.full
@pytest.mark.parametrize("case", STEPPED)
def test_an_optimizer_in_the_cpus_memory_gives_the_same_weights_bit_for_bit(pair, tmp_path, case):
    sizes = dict(STEPPED[case])
    changes = {name: sizes.pop(name) for name in ("bf16", "freeze_params_name_list") if name in sizes}
    save_model(model_of("qwen3, tied"), tokenizer(), str(tmp_path))
    layout = MegatronConfig(actor_num_gpus_per_node=2, **sizes)
    device, cpu = (
        pair.run(spread, layout, tmp_path, {**changes, "optimizer_cpu_offload": on_cpu}, 3)
        for on_cpu in (False, True)
    )
    for ours, theirs in zip(cpu, device, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert [name for name, _ in mine.gradients] == [name for name, _ in other.gradients]
            assert all((a == b).all() for (_, a), (_, b) in zip(mine.gradients, other.gradients, strict=True))


def spared(layout: MegatronConfig, _rank: int, folder) -> tuple[int, int]:
    """Runs in a rank: bytes of the optimizer on the device, and of the tensors that stand for its copies."""
    from agentrl.trainer.megatron.worker import MegatronWorker

    plan = MegatronPlan(
        layout=layout,
        policy=Learning(PolicyLoss(), learns(bf16=True, optimizer_cpu_offload=True), 6),
        models={"old": str(folder)},
    )
    worker = MegatronWorker(plan)
    worker.update(batch())
    learner = worker._learners["old"]
    (only,) = learner.optimizer._inner.chained_optimizers
    mains = [main for group in only.optimizer.param_groups for main in group["params"]]
    return sum(t.nbytes for t in learner.optimizer_tensors()), sum(
        m.untyped_storage().nbytes() for m in mains
    )


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{}, WHOLE], ids=["shared", "whole"])
def test_the_device_has_nothing_of_that_optimizer(pair, tmp_path, sizes):
    save_model(model_of("qwen3"), tokenizer(), str(tmp_path))
    layout = MegatronConfig(actor_num_gpus_per_node=2, **sizes)
    assert pair.run(spared, layout, tmp_path) == [(0, 0), (0, 0)]
    networks, config = Networks(model_of("qwen3").config), learns(bf16=True)
    whole = rank_memory(networks, layout, config, 16, 0)
    on_cpu = config.model_copy(update={"optimizer_cpu_offload": True})
    assert rank_memory(networks, layout, on_cpu, 16, 0) == whole._replace(optimizer=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_pattern_chooses_what_it_chooses_in_torch(kind):
    config = settings(freeze_params_name_list=["embed", r"layers\.[13]\.", "o_proj"])
    model = model_of(kind)
    freeze(model, config)
    # The model has several experts as one tensor, which a checkpoint has in parts.
    parts = names_in_checkpoints(model, dict(model.named_parameters()))
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    expected = {part for name in learning for part in parts.get(name, (name,))}
    chosen = {name for placed in learning_of(shape_of(model.config), config) for name in placed.hf}
    assert chosen - {name for name, _ in checkpoint_buffers(model)} == expected


def checkpoint_buffers(model):
    """What a checkpoint has and no optimizer learns: the bias of a choice of experts."""
    return [named for named in model.named_buffers() if named[0].endswith("e_score_correction_bias")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze_params_name_list": ["q_proj"]}, "q_proj.weight and .*v_proj.weight as one parameter"),
        ({"only_train_params_name_list": ["expert"]}, "`expert` is in the name of no parameter of the model"),
        ({"freeze_params_name_list": ["."]}, "leaves nothing of the model to learn"),
    ],
)
def test_a_pattern_that_megatron_cannot_follow_is_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        learning_of(shape_of(model_of("qwen3").config), settings(**changes))
