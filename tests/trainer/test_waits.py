"""Between two kernels of a pass nothing waits for the card: no value is read, in no layer and for no row.

However many rows a call has, it waits as often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.algorithms.corrections import FactorsInStep, IcePop, Mis, Tis
from agentrl.algorithms.gates import InStages, TokenGate
from agentrl.losses import Loss, OutputHead, PolicyLoss, Targets, ValueLoss, logprobs_and_entropy, to_device
from agentrl.trainer.batch import micro_batches, shares_of
from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.families import VALUE_HEAD
from agentrl.trainer.megatron.model.rows import padded
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning, reported
from agentrl.trainer.torch import AuxiliaryModels, Critic, critic_over
from agentrl.trainer.torch.forward import TorchNetwork, token_outputs
from agentrl.trainer.torch.learner import Learner
from agentrl.trainer.torch.worker import TorchWorker
from agentrl.types import KEPT_IDS, ROUTED_EXPERTS, Extra, ProximalInStep, ScoreRole, TrainBatch
from tests.trainer.families import family
from tests.trainer.megatron.ahead import checkpoint_with
from tests.trainer.megatron.equality import routed_samples, share_of
from tests.trainer.megatron.models import CONFIGS, SIZES, checkpoint_of, model_of
from tests.trainer.megatron.test_losses import LOSSES, batch, head_weight
from tests.trainer.megatron.together import Ranks
from tests.trainer.pool import Pool
from tests.trainer.routes import replayed
from tests.trainer.sharded import Kind, ranks_of
from tests.trainer.sharded import Ranks as Shards
from tests.trainer.test_routing import routed_batch
from tests.trainer.tiny import MASKS, qwen3, settings
from tests.trainer.tiny import batch as tiny_batch
from tests.trainer.waits import waits

LAYERS = (1, 3)
LAYOUTS = {
    1: ({}, {"recompute_granularity": "full"}),
    2: (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {},
    ),
}

MAX_TOKENS = (1000, 12)
# Two of each length, which rows of few tokens part, and so batches of like length.
masked = partial(tiny_batch, masks=MASKS * 2)
ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.02}
LORA = {"lora_rank": 2}
FOLDED = ("gemma2_caps", "mistral_window", "deepseek_v3", "lfm2", "qwen3_5", "qwen3_next")
ONCE = {
    "agentrl.trainer.plan:reported",
    "agentrl.trainer.routing:routed",
    "agentrl.trainer.loss_inputs:logprobs",
    "agentrl.trainer.torch.learner:_backward",
    "agentrl.trainer.torch.learner:_clipped",
}
"""Where a call waits behind its last row."""
PLANTED = "planted"
"""A function that reads a value of each row."""
BY_TOKEN = {
    "tis": Tis(1.1, 0.9),
    "icepop": IcePop(0.9, 1.2),
    "mis": Mis("token", "mask", 0.9, 1.1),
    "gate": InStages(None, TokenGate("k2", "token", 0.1)),
    "tis and a gate": InStages(Tis(1.2), TokenGate("k3", "token", 0.1)),
}


def unplanted(places: Counter[str]) -> Counter[str]:
    return Counter({place: n for place, n in places.items() if not place.endswith(f":{PLANTED}")})


def model_with(kind: str, layers: int):
    given = CONFIGS[kind]()
    config = type(given)(**{**given.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def waits_of_megatron(layout: MegatronConfig, _rank: int, kind: str, layers: int, loss: str):
    """Runs in a rank: where a forward pass waits, and where forward and backward pass of a step do."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model, train_batch = model_with(kind, layers), batch("token mean")
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    outputs = partial(logprobs_of, entropy_gradient=loss == "ppo")
    learner = MegatronLearner(network, outputs, Learning(LOSSES[loss], settings(), 10))
    rows = share_of(layout, train_batch.samples)
    with waits() as scoring:
        learner.passes.forward(rows)
    inputs = StepInputs(train_batch)
    with waits() as learning:
        learner.passes.learn(rows, lambda row, out: learner._loss(out, inputs.of(row, out)))
    return scoring, learning


@pytest.mark.parametrize("count", [1, 2])
def test_no_pass_of_megatron_waits_for_the_card(count):
    dense = [("qwen3", "grpo", 1), ("qwen3", "grpo", 3), ("glm4", "ppo", 2), ("qwen3_5_text", "grpo", 1)]
    # Ranks that share experts have to know how many tokens come.
    kinds = {1: [*dense, ("deepseek_v3", "grpo", 2)], 2: dense}
    with Ranks(count) as ranks:
        for sizes in LAYOUTS[count]:
            config = MegatronConfig(actor_num_gpus_per_node=count, **sizes)
            for kind, loss, layers in kinds[count]:
                for scoring, learning in ranks.run(waits_of_megatron, config, kind, layers, loss):
                    assert not scoring, (sizes, kind, layers)
                    assert not learning, (sizes, kind, layers)


class MegatronCall(NamedTuple):
    """A network of Megatron's, and what it learns from. settings: of the trainer. ahead: layers that predict
    further ahead."""

    kind: str = "qwen3"
    in_step: bool = False
    critic: bool = False
    settings: Mapping[str, object] = {}
    ahead: int = 0

    def learner(self, layout: MegatronConfig):
        from agentrl.trainer.megatron.learner import MegatronLearner
        from agentrl.trainer.megatron.model.network import Network
        from agentrl.trainer.megatron.model.outputs import logprobs_of, values_of

        shape = shape_of(model_of(self.kind).config)._replace(ahead=self.ahead)
        weights = checkpoint_with(self.kind, self.ahead) if self.ahead else checkpoint_of(model_of(self.kind))
        network = Network(shape.of_a_critic if self.critic else shape, layout, bf16=False)
        network.load({**weights, VALUE_HEAD: head_weight()}.__getitem__)
        learning = Learning(ValueLoss() if self.critic else PolicyLoss(), settings(**self.settings), 10)
        return MegatronLearner(network, values_of if self.critic else logprobs_of, learning)

    def batch(self) -> TrainBatch:
        made = batch("token mean")
        if "router_replay" in self.settings:
            of_engine = [s.extras for s in routed_samples(self.kind)]
            made = replace(
                made,
                samples=tuple(replace(s, extras=e) for s, e in zip(made.samples, of_engine, strict=True)),
            )
        in_step = ProximalInStep(FactorsInStep(Tis(1.1, 0.9))) if self.in_step else None
        return replace(made, in_step=in_step)


MEGATRON = {
    "policy": MegatronCall(),
    "critic": MegatronCall(critic=True),
    "in step": MegatronCall(in_step=True),
    "linear attention": MegatronCall("qwen3_5_text"),
    "replay and losses of routers": MegatronCall(
        "qwen3_moe", settings={"router_replay": "R3", **ROUTER_LOSSES}
    ),
    "ahead": MegatronCall("mimo", settings={"enable_mtp_training": True}, ahead=2),
}


def waits_of_rows(layout: MegatronConfig, _rank: int, name: str, max_tokens: int, reads: bool):
    """Runs in a rank: the number of its rows, and where scoring them and learning from them waits."""
    from megatron.core import parallel_state

    from agentrl.trainer.megatron.learner import is_reporting_rank

    call = MEGATRON[name]
    learner, train_batch = call.learner(layout), call.batch()
    masks = [sample.loss_mask for sample in train_batch.samples]
    own = shares_of(masks, layout.data_parallel_size, SIZES["hidden_size"])
    own_masks = own[parallel_state.get_data_parallel_rank()]
    rows = padded(micro_batches(train_batch.samples, own_masks, max_tokens), layout.row_count_multiple)

    def planted(_stage, _inputs, states):
        states.sum().item()

    for stage in learner.passes.network.stages if reads else ():
        stage.register_forward_hook(planted)
    replay = call.settings.get("router_replay")
    with waits() as places:
        routing = learner.passes.routing(replay, records=True)
        outputs = learner.passes.forward(rows, routing)
        reported(outputs if is_reporting_rank() else [], statistics=not call.critic)
        if routing is not None:
            routing.routed()
        learner.learn(rows, train_batch)
    return len(rows), places


MEGATRON_LAYOUTS = {
    1: ({}, tuple(MEGATRON)),
    2: (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        ("policy", "critic", "in step", "ahead"),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("count", MEGATRON_LAYOUTS)
def test_megatron_waits_as_often_for_few_rows_as_for_many(count):
    sizes, names = MEGATRON_LAYOUTS[count]
    layout = MegatronConfig(actor_num_gpus_per_node=count, **sizes)
    with Ranks(count) as ranks:
        for name in names:
            few, many = (
                ranks.run(waits_of_rows, layout, name, max_tokens, reads)
                for max_tokens, reads in ((1000, False), (24, True))
            )
            for (number, places), (more, with_reads) in zip(few, many, strict=True):
                assert more > number
                # They are scored, and learned from.
                assert with_reads[f"item at {__name__}:{PLANTED}"] == 2 * more
                assert unplanted(with_reads) == places, name


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_waits_for_the_card(loss):
    places = waits_of_torch(1, loss)
    assert not places


def waits_of_torch(layers: int, loss: str):
    train_batch = batch("token mean")
    forward = partial(token_outputs, bf16=False, entropy_gradient=loss == "ppo")
    learner = Learner(
        TorchNetwork(model_with("qwen3", layers)), forward, Learning(LOSSES[loss], settings(), 10)
    )
    inputs = StepInputs(train_batch)
    with waits() as places:
        learner._backward(train_batch, inputs)
    # The sums of the step, once.
    return places - Counter({"tolist at agentrl.trainer.torch.learner:_backward": 1})


def test_no_pass_of_the_torch_trainer_waits_for_the_card():
    for layers in LAYERS:
        assert not waits_of_torch(layers, "grpo")


def with_values() -> TrainBatch:
    made = masked()
    advantages = made.credit.advantages
    scores, credit = replace(made.scores, values=advantages), replace(made.credit, returns=advantages)
    return replace(made, scores=scores, credit=credit)


def in_step(correction) -> TrainBatch:
    return replace(with_values(), in_step=ProximalInStep(FactorsInStep(correction)))


def cut() -> TrainBatch:
    """Each token was sampled from three ids, or from two."""
    made = masked()
    kept = [Extra.of_lists([sorted({0, 1, int(id)}) for id in s.token_ids]) for s in made.samples]
    samples = tuple(replace(s, extras={KEPT_IDS: k}) for s, k in zip(made.samples, kept, strict=True))
    return replace(made, samples=samples)


def routed(kind: str) -> TrainBatch:
    """With the engine's experts, and as many of the trainer's own."""
    made = routed_batch(family(kind), masked)
    rows = [sample.extras[ROUTED_EXPERTS].values for sample in made.samples]
    return replace(made, samples=replayed(made.samples, rows))


class Call(NamedTuple):
    """What a worker does with a batch. role: None = it learns from it. settings: of the trainer."""

    batch: Callable[[], TrainBatch]
    role: ScoreRole | None = None
    model: Callable[[], PreTrainedModel] = partial(qwen3, torch.float32)
    settings: Mapping[str, object] = {}
    loss: Loss = PolicyLoss()
    statistics: bool = False

    def waits(self, max_tokens: int, *, reads: bool = False) -> tuple[int, Counter[str]]:
        """How often something goes through a network, and where it waits. reads: it is read there, too.

        max_tokens: of a row.
        """
        config = settings(max_tokens_per_gpu=max_tokens, **self.settings)
        model, train_batch = self.model(), self.batch()
        critic = Critic(critic_over(model), Learning(ValueLoss(value_clip=0.3), config, 10))
        has_critic = self.role == "values" or train_batch.credit.returns is not None
        auxiliary = AuxiliaryModels(critic if has_critic else None)
        worker = TorchWorker(model, Learning(self.loss, config, 10), auxiliary)
        passed = []

        def planted(_network, _inputs, output):
            passed.append(output.last_hidden_state.sum().item() if reads else None)

        for network in (model, critic.network):
            network.base_model.register_forward_hook(planted)
        with waits() as places:
            if self.role is None:
                worker.update(train_batch)
            else:
                worker.score(train_batch.samples, self.role, statistics=self.statistics)
        return len(passed), places


CALLS = {
    "logprobs": Call(masked, "old"),
    "logprobs, entropies, squares": Call(masked, "old", statistics=True),
    "logprobs of what was cut": Call(cut, "old"),
    "logprobs without adapters": Call(masked, "ref", settings=LORA),
    "values": Call(masked, "values"),
    "policy": Call(masked),
    "policy and critic": Call(with_values),
    "an entropy bonus": Call(masked, loss=PolicyLoss(entropy_coef=0.01)),
    "layers again": Call(with_values, settings={"gradient_checkpointing": True}),
    "adapters": Call(with_values, settings=LORA),
    "what was cut": Call(cut),
    **{f"in step, {name}": Call(partial(in_step, correction)) for name, correction in BY_TOKEN.items()},
    "in step, bf16": Call(partial(in_step, Tis()), settings={"bf16": True}),
}
for _kind in ("qwen3_moe", "deepseek_v3"):
    _experts = partial(Call, partial(routed, _kind), model=partial(family, _kind))
    CALLS |= {
        f"{_kind}, logprobs, R3": _experts("old", settings={"router_replay": "R3"}),
        f"{_kind}, logprobs, R2": _experts("old", settings={"router_replay": "R2"}),
        f"{_kind}, R3 and losses": _experts(settings={"router_replay": "R3", **ROUTER_LOSSES}),
        f"{_kind}, R2": _experts(settings={"router_replay": "R2"}),
    }
CALLS |= {f"{kind}, policy": Call(masked, model=partial(family, kind)) for kind in FOLDED}


@pytest.mark.parametrize("name", CALLS)
def test_the_torch_trainer_waits_as_often_for_one_row_as_for_several(name):
    one, places = CALLS[name].waits(MAX_TOKENS[0])
    several, with_reads = CALLS[name].waits(MAX_TOKENS[1], reads=True)
    assert several > one
    assert with_reads[f"item at {__name__}:{PLANTED}"] == several
    assert unplanted(with_reads) == places
    assert all(place.partition(" at ")[2] in ONCE for place in places), places


def waits_of_shards(store, rank: int, max_tokens: int, reads: bool):
    """Runs in a rank: what goes through its networks, and where scoring and learning wait."""
    kind = Kind("qwen3", has_critic=True, changes={"max_tokens_per_gpu": max_tokens})
    train_batch, passed = with_values(), []

    def planted(_network, _inputs, output):
        passed.append(output.last_hidden_state.sum().item() if reads else None)

    with ranks_of(store, rank, Shards(2, 2)) as shards:
        model = kind.model()
        worker = kind.worker(model, shards)
        model.base_model.register_forward_hook(planted)
        with waits() as places:
            worker.score(train_batch.samples, "old")
            worker.update(train_batch)
    return len(passed), places


def test_ranks_that_share_a_network_wait_as_often_for_few_rows_as_for_many():
    with Pool(2) as pool:
        few = pool.meet(waits_of_shards, MAX_TOKENS[0], False)
        many = pool.meet(waits_of_shards, MAX_TOKENS[1], True)
    for (number, places), (more, with_reads) in zip(few, many, strict=True):
        assert more > number
        assert with_reads[f"item at {__name__}:{PLANTED}"] == more
        assert unplanted(with_reads) == places


WAITING = {
    "a number": lambda x: x.sum().item(),
    "a list": lambda x: x.tolist(),
    "a condition": lambda x: bool(x.sum() > 1),
    "a size": lambda x: range(x[1].long()),
    "text": lambda x: f"{x.sum():.1f}",
    "cpu": lambda x: x.long().cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": np.asarray,
    "a mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor(np.ones(2), device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "to": lambda x: torch.tensor([1.0]).to(x.device),
    "to, of numpy's": lambda x: torch.from_numpy(np.ones(2)).to(x.device),
    "to, of others": lambda x: (2 * torch.arange(3)).to(device=x.device),
    "copy_": lambda x: x.clone().copy_(torch.ones(4)),
    "an index of a list": lambda x: x[[0, 1]],
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "a value of the host": lambda x: x.clone().__setitem__(slice(0, 1), torch.ones(1)),
}
GOING_ON = {
    "a number of the host": lambda x: torch.tensor(3.0).item(),
    "where it is": lambda x: x.to(x.device),
    "another dtype": lambda x: x.to(torch.int64),
    "made there": lambda x: torch.arange(3, device=x.device),
    "a factor of the host": lambda x: x * torch.tensor(2.0),
    "a slice": lambda x: x[0:2],
    "an index": lambda x: x[x.long()],
    "a number where a mask is": lambda x: x.clone().__setitem__(x > 1, 0.0),
    "repeats": lambda x: x.repeat_interleave(2),
    "repeats of a known sum": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "to_device": lambda x: to_device(np.ones(2), x.device),
}


@pytest.mark.parametrize("name", [*WAITING, *GOING_ON])
def test_a_wait_is_noticed_and_nothing_else(name):
    x = torch.arange(4.0)
    with waits() as places:
        (WAITING | GOING_ON)[name](x)
    assert bool(places) == (name in WAITING), places


def test_what_is_sent_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch):
    pinned, sent = [], []

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, device, **options):
        sent.append((tensor, device, options))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    array = np.arange(3.0)
    for device in ("cuda:1", torch.device("cuda", 1)):
        assert to_device(array, device) is pinned[-1]
        assert sent[-1][0] is pinned[-1]
        assert sent[-1][1:] == (device, {"non_blocking": True})
    assert to_device(array, "cpu").data_ptr() == array.ctypes.data
    assert (len(pinned), len(sent)) == (2, 2)


def test_a_wait_of_a_backward_pass_is_noticed():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    y = Reads.apply(nn.Parameter(torch.ones(4))).sum()
    with waits() as places:
        y.backward()
    assert any("_local_scalar_dense" in place for place in places)
    targets = Targets(torch.zeros(4, dtype=torch.int64), torch.ones(4))
    with waits() as places:
        logprobs_and_entropy(torch.randn(4, 2, requires_grad=True), OutputHead(torch.randn(3, 2)), targets)
    assert not places
