"""What a user may set of Megatron's own configs is read, does what it says, and nothing else is taken."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import get_type_hints

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from pydantic import TypeAdapter, ValidationError
from transformers import Qwen3Config

from agentrl.errors import ConfigError
from agentrl.losses import PolicyLoss
from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.megatron.arguments import OPEN, Target, check_arguments
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import check_layout, shape_of
from agentrl.trainer.plan import Learning
from tests.trainer.megatron.equality import gradients_in, oracle, part_of, put_together, share_of
from tests.trainer.megatron.models import SIZES, checkpoint_of, model_of
from tests.trainer.megatron.test_equality import noise_of
from tests.trainer.megatron.test_losses import batch
from tests.trainer.tiny import settings

CLASSES = {
    Target.MODEL: TransformerConfig,
    Target.REPLICAS: DistributedDataParallelConfig,
    Target.OPTIMIZER: OptimizerConfig,
}
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PP, "num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute_granularity": "full"}
SHARED = {"use_distributed_optimizer": True}
CHOSEN = {
    "fp32_residual_connection": ({}, True),
    "moe_router_dtype": ({"expert_model_parallel_size": 2}, "fp32"),
    "clone_scatter_output_in_embedding": ({**TP, "sequence_parallel": True}, False),
    "recompute_method": (FULL, "block"),
    "recompute_num_layers": (FULL, 2),
    "recompute_modules": ({"recompute_granularity": "selective"}, ["core_attn", "mlp"]),
    "distribute_saved_activations": ({**TP, **FULL}, True),
    "deallocate_pipeline_outputs": (PP, True),
    "batch_p2p_sync": (PP, False),
    "overlap_p2p_comm_warmup_flush": (VIRTUAL, True),
    "microbatch_group_size_per_vp_stage": (VIRTUAL, 4),
    "deterministic_mode": ({}, True),
    "config_logger_dir": ({}, "configs"),
    "overlap_grad_reduce": ({}, False),
    "overlap_param_gather": (SHARED, True),
    "bucket_size": ({}, 1000),
    "pad_buckets_for_high_nccl_busbw": (SHARED, True),
    "reduce_scatter_with_fp32_accumulation": (SHARED, True),
}
OPTIMIZER = {"decoupled_lr": 0.03, "decoupled_weight_decay": False, "apply_wd_to_qk_layernorm": True}
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
LR, DECAY, BETAS, EPS = 0.01, 0.5, (0.8, 0.9), 1e-3


def test_their_types_are_those_of_megatrons_own_classes():
    for target, kind in CLASSES.items():
        known = {
            name: TypeAdapter(hint) for name, hint in get_type_hints(kind).items() if name in OPEN[target]
        }
        for name, expected in OPEN[target].items():
            value = CHOSEN[name][1] if name in CHOSEN else OPTIMIZER[name]
            assert type(value) is expected
            known[name].validate_python(value, strict=True)
            for wrong in ({}, b""):
                with pytest.raises(ValidationError):
                    known[name].validate_python(wrong, strict=True)


def test_each_open_field_is_tried_out():
    assert {*CHOSEN, *OPTIMIZER} == {name for of_class in OPEN.values() for name in of_class}


@pytest.mark.parametrize(
    "fields_", [{"batch_p2p_sync": False, "num_layers": 4}, {"hidden_dropout": 0.0}, {"decoupled_lr": 1}]
)
def test_a_field_may_be_added_and_repeat_what_is_so(fields_):
    check_arguments(fields_, shape_of(Qwen3Config(**SIZES)).sizes)


@pytest.mark.parametrize(
    ("fields_", "message"),
    [
        ({"num_layers": 3}, "says num_layers = 3, the checkpoint has 4; leave it out"),
        ({"tensor_model_parallel_size": 2}, r"holds tensor_model_parallel_size; set it under \[layout\]"),
        ({"adam_eps": 1e-6}, r"holds adam_eps; set it under \[trainer\] itself"),
        # It would learn a third of each gradient.
        (
            {"calculate_per_token_loss": False},
            "says calculate_per_token_loss = False, here it is always True",
        ),
        ({"hidden_dropout": 0.1}, "says hidden_dropout = 0.1, here it is always 0.0; leave it out"),
        ({"attention_softmax_in_fp32": True}, ".* which nothing here reads, .* These are: fp32_residual_"),
        ({"decoupled_Ir": 1.0}, "holds decoupled_Ir, which .* leave it out, or write decoupled_lr"),
        ({"batch_p2p_sync": 1}, "says batch_p2p_sync = 1; it must be of type bool"),
        ({"decoupled_lr": True}, "says decoupled_lr = True; it must be of type float"),
        ({"moe_router_dtype": "fp64"}, "says moe_router_dtype = 'fp64'; write 'fp32', or leave it out"),
        ({"moe_router_dtype": "fp32"}, "sets moe_router_dtype, and this model has no router; leave it out"),
        (
            {"recompute_num_layers": 2},
            "sets recompute_num_layers, but nothing is recomputed; set recompute_granularity, too",
        ),
    ],
)
def test_a_field_that_contradicts_or_does_nothing_is_refused(fields_, message):
    with pytest.raises(ConfigError, match=f"megatron_config {message}"):
        check_layout(shape_of(Qwen3Config(**SIZES)), MegatronConfig(megatron_config=fields_))


@contextmanager
def noting_reads(config):
    """The fields of a class of Megatron's that are read once an object of it was made."""
    read, look, check = set(), config.__getattribute__, config.__post_init__

    def noted(made, name):
        read.add(name)
        return look(made, name)

    def checked(made):
        check(made)
        read.clear()

    config.__getattribute__, config.__post_init__ = noted, checked
    try:
        yield read
    finally:
        config.__getattribute__, config.__post_init__ = look, check


def reads_and(work, layout, rank, *args):
    """Runs in a rank: what `work` gives, and the fields that were read of each class once it was made."""
    with ExitStack() as noting:
        reads = {target: noting.enter_context(noting_reads(kind)) for target, kind in CLASSES.items()}
        return work(layout, rank, *args), reads


def reads_and_part_of(layout, rank, kind):
    return reads_and(part_of, layout, rank, kind)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, (sizes, _) in CHOSEN.items() if sizes != SHARED])
def test_what_a_user_may_choose_is_read_and_changes_nothing_that_is_learned(pair, name, tmp_path):
    sizes, value = CHOSEN[name]
    if name == "config_logger_dir":
        value = str(tmp_path / value)
    chosen = MegatronConfig(
        actor_num_gpus_per_node=2, use_distributed_optimizer=False, megatron_config={name: value}, **sizes
    )
    kind = "qwen3_moe" if name == "moe_router_dtype" else "qwen3"
    parts, read = zip(*pair.run(reads_and_part_of, chosen, kind), strict=True)
    assert any(name in of_class for reads in read for of_class in reads.values())
    result, expected = put_together(kind, chosen, list(parts)), oracle(kind)
    for parameter, gradient in expected.gradients.items():
        assert (result.gradients[parameter] - gradient).norm() <= noise_of(kind) * gradient.norm(), parameter


def stepped(layout: MegatronConfig, _rank: int, changes):
    """Runs in a rank: its parameters before and after two steps, and the gradient of each step."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model = model_of("qwen3")
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    options = {
        "lr": LR,
        "weight_decay": DECAY,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_eps": EPS,
    }
    config = settings(**options, lr_warmup_iters=0, clip_grad=1e9, **changes)
    learner = MegatronLearner(network, logprobs_of, Learning(PolicyLoss(), config, 10))
    train_batch = batch("token mean")
    rows = share_of(layout, train_batch.samples)

    def values():
        return {piece.placed.megatron: piece.parameter.detach().double() for piece in network.pieces()}

    before, gradients = values(), []
    for _ in range(2):
        learner.backward(rows, StepInputs(train_batch))
        gradients.append({name: torch.tensor(g).double() for name, g in gradients_in(network)})
        learner.learn(rows, train_batch)
    return before, gradients, values()


def adam(name, weight, gradients, chosen):
    """A parameter after steps of Adam by its formula, in float64."""
    is_qk = "q_layernorm" in name or "k_layernorm" in name
    decays = weight.ndim > 1 or (is_qk and chosen.get("apply_wd_to_qk_layernorm", False))
    lr = chosen.get("decoupled_lr", LR) if name in ENDS else LR
    decay, is_decoupled = DECAY * decays, chosen.get("decoupled_weight_decay", True)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(gradients, 1):
        slope = gradient.view_as(weight) + (0 if is_decoupled else decay * weight)
        if is_decoupled:
            weight = weight * (1 - lr * decay)
        first = BETAS[0] * first + (1 - BETAS[0]) * slope
        second = BETAS[1] * second + (1 - BETAS[1]) * slope**2
        means = first / (1 - BETAS[0] ** number), second / (1 - BETAS[1] ** number)
        weight = weight - lr * means[0] / (means[1].sqrt() + EPS)
    return weight


@pytest.mark.parametrize("changes", [{}, {"optimizer_cpu_offload": True}], ids=["", "on the CPU"])
@pytest.mark.parametrize("name", [None, *OPTIMIZER])
def test_a_step_is_the_formula_in_float64(single, name, changes):
    chosen = {} if name is None else {name: OPTIMIZER[name]}
    layout = MegatronConfig(use_distributed_optimizer=False, megatron_config=chosen)
    [(before, gradients, after)] = single.run(stepped, layout, changes)
    plain = {}
    for parameter, weight in before.items():
        of_it = [step[parameter] for step in gradients]
        plain[parameter] = adam(parameter, weight, of_it, {})
        expected = adam(parameter, weight, of_it, chosen)
        torch.testing.assert_close(after[parameter], expected, rtol=1e-5, atol=1e-6)
    differ = any((after[each] - plain[each]).abs().max() > 1e-4 for each in before)
    assert differ == (name is not None)


def reads_and_steps_of(layout, rank):
    return reads_and(stepped, layout, rank, {})


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, (sizes, _) in CHOSEN.items() if sizes == SHARED])
def test_what_replicas_that_share_an_optimizer_may_choose_changes_no_weight(pair, name):
    ends = []
    for chosen in ({}, {name: True}):
        layout = MegatronConfig(actor_num_gpus_per_node=2, megatron_config=chosen)
        results, reads = zip(*pair.run(reads_and_steps_of, layout), strict=True)
        assert name in reads[0][Target.REPLICAS]
        ends.append(results)
    for (*_, plain), (*_, changed) in zip(*ends, strict=True):
        for parameter, weight in plain.items():
            torch.testing.assert_close(changed[parameter], weight, rtol=1e-6, atol=1e-7)


@given(st.data())
def test_stages_are_those_of_megatron(data):
    ranks, virtual = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    middle = data.draw(st.integers(1, 3)) * virtual
    first, last = (
        data.draw(st.none() | st.integers(1, 4).map(lambda number: number * virtual)) for _ in range(2)
    )
    ends = [number for number in (first, last) if number is not None]
    assume(virtual == 1 or len(ends) < ranks)
    layers = sum(ends) + middle * (ranks - len(ends))
    layout = MegatronConfig(
        pipeline_model_parallel_size=ranks,
        num_virtual_stages_per_pipeline_rank=virtual,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=None if virtual == 1 else virtual,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    stages = layout.stages(layers)
    assert [*chain(*stages)] == [*range(layers)]
    for rank in range(ranks):
        for number, stage in enumerate(layout.stages_of(rank, layers)):
            place = None if virtual == 1 else number
            assert len(stage) == get_num_layers_to_build(config, place, rank)
            assert stage.start == get_transformer_layer_offset(config, place, rank)


@pytest.mark.parametrize(
    ("sizes", "layers", "message"),
    [
        ({}, 61, "= 4 does not divide the model's 61 layers; lower it, or set decoder_last.* = 13"),
        ({}, 3, "the model's 3 layers are not shared out evenly over .* = 4 with num_virtual"),
        ({"decoder_first_pipeline_num_layers": 61}, 61, "61 layers are not shared out evenly"),
        ({"decoder_last_pipeline_num_layers": 12}, 61, "61 layers are not shared out evenly"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 60, "60 layers are not shared out evenly"),
        (
            {"decoder_first_pipeline_num_layers": 3, "pipeline_model_parallel_size": 2}
            | {"decoder_last_pipeline_num_layers": 3},
            7,
            "7 layers are not shared out evenly over pipeline_model_parallel_size = 2",
        ),
        (
            {"decoder_first_pipeline_num_layers": 4, "pipeline_model_parallel_size": 2}
            | {"decoder_last_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2},
            6,
            "6 layers are not shared out evenly .* change one of these, decoder_first_pipeline",
        ),
    ],
)
def test_layers_that_do_not_come_out_even_are_refused_with_what_would(sizes, layers, message):
    with pytest.raises(ConfigError, match=message):
        MegatronConfig(**{"pipeline_model_parallel_size": 4, **sizes}).stages(layers)
