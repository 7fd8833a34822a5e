"""What the ranks of a layout compute, put together under Hugging Face names; and the same by autograd alone.

The oracle runs each sample by itself through transformers and differentiates a sum that is written out here.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.losses import LossOutput
from agentrl.trainer.batch import MicroBatch, micro_batches, shares_of
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.families import VALUE_HEAD, Placed
from agentrl.trainer.megatron.model.rows import padded
from agentrl.trainer.megatron.model.rules import Run, unshard
from agentrl.trainer.megatron.model.shape import Shape, shape_of, tensor_shapes_of
from agentrl.trainer.routing import NO_LOSSES, RoutedReport, RouterLosses, RouterReplay
from agentrl.types import KEPT_IDS, ROUTED_EXPERTS, Extra, RolloutId, Sample
from agentrl.weights.hf.routing import expert_sizes
from tests.trainer.megatron.models import SIZES, VOCAB, checkpoint_of, model_of
from tests.trainer.routes import made_to_choose, routed, router_losses
from tests.trainer.tiny import divisor

MAX_TOKENS = 32
ENTROPY = 0.1
AUX, Z = 3.0, 0.05


class Part(NamedTuple):
    """What one rank has. place: tensor, pipeline, data and context rank. experts: the rank of those
    that share the experts, and of those that share each. routed, routing: what its routers took, and the
    sums of them."""

    place: tuple[int, int, int, int]
    experts: tuple[int, int]
    logps: list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]
    gradients: list[tuple[str, np.ndarray]]
    loss: float
    queries: dict[str, int]
    routed: RoutedReport | None = None
    routing: np.ndarray | None = None


@lru_cache
def samples() -> tuple[Sample, ...]:
    """Ragged, with holes in the mask; the last one has a single predicted token. Two of three were cut."""
    draw = np.random.default_rng(0)
    samples_ = []
    for number, length in enumerate([*draw.integers(4, 23, 7), 2]):
        mask = draw.random(length) < 0.6
        mask[0], mask[-1] = False, True
        ids = draw.integers(0, VOCAB, length).astype(np.int32)
        samples_.append(
            Sample(
                token_ids=ids,
                author=mask.astype(np.int8),
                loss_mask=mask,
                logprobs=np.where(mask, -1, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=np.zeros(length, np.int32),
                temperatures=np.full(length, 0.8 if number % 2 else 1.0, np.float32),
                rollout_id=RolloutId(f"r{number}"),
                extras={KEPT_IDS: Extra.of_lists(kept_ids(draw, ids, mask))} if number % 3 else {},
            )
        )
    return tuple(samples_)


@lru_cache
def routed_samples(kind: str) -> tuple[Sample, ...]:
    """The same, with experts at random of most tokens."""
    sizes = expert_sizes(model_of(kind).config)
    assert sizes is not None
    return routed(samples(), len(sizes.layers.numbers), sizes.experts, sizes.layers.k)


def kept_ids(draw, ids, mask) -> list[np.ndarray]:
    """Of each predicted token, itself and up to VOCAB / 2 others; of one it alone; of one nothing was cut."""
    sizes = draw.integers(0, VOCAB // 2, len(ids))
    kept = [
        np.unique([id_, *draw.integers(0, VOCAB, size)]) if at else np.zeros(0, int)
        for id_, size, at in zip(ids, sizes, mask, strict=True)
    ]
    kept[np.flatnonzero(mask)[0]] = np.array([ids[mask][0]])
    if mask.sum() > 2:
        kept[np.flatnonzero(mask)[1]] = np.zeros(0, int)
    return [each.astype(np.int32) for each in kept]


def weights() -> list[np.ndarray]:
    draw = np.random.default_rng(5)
    return [draw.normal(size=len(sample)).astype(np.float32) for sample in samples()]


def part_of(
    layout: MegatronConfig,
    _rank: int,
    kind: str,
    bf16: bool = False,
    engines: Literal["replayed", "compared", "balanced"] | None = None,
) -> Part:
    """Runs in a rank: logprobs, then the gradient of a weighted sum of logprobs and entropies.

    engines: whether routers choose what the samples say, or are only compared with that; None = they say
    nothing. balanced: nothing, and the losses of the routers are on.
    """
    from agentrl.trainer.megatron.device import queries
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of
    from agentrl.trainer.megatron.passes import Passes

    model = model_of(kind)
    network = Network(shape_of(model.config), layout, bf16=bf16)
    network.load(checkpoint_of(model).__getitem__)
    mine = share_of(layout, routed_samples(kind) if engines in ("replayed", "compared") else samples())
    passes = Passes(network, partial(logprobs_of, entropy_gradient=True))
    replay: RouterReplay | None = "R3" if engines == "replayed" else None

    def loss(row, outputs):
        weight_N = torch.from_numpy(row.gather(weights())).to(outputs.logp_N.device)
        total = (weight_N * (ENTROPY * outputs.entropy_N - outputs.logp_N)).sum()
        return LossOutput(total, {"loss": total.detach()})

    recording = passes.routing(replay, records=True)
    outputs_by_row = passes.forward(mine, recording)
    on = TrainerConfig(moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z)
    losses = RouterLosses.of(on, [sample.loss_mask for sample in samples()])
    routing = passes.routing(replay, losses=losses if engines == "balanced" else NO_LOSSES)
    reports = passes.learn(mine, loss, routing)
    return Part(
        place=place(),
        experts=places_of_experts(),
        logps=[
            (row.members, outputs.logp_N.cpu().numpy(), outputs.entropy_N.cpu().numpy())
            for row, outputs in outputs_by_row
        ],
        gradients=gradients_in(network),
        loss=sum(float(metrics["loss"]) for metrics in reports),
        queries=dict(queries),
        routed=None if recording is None else recording.routed(),
        routing=None if routing is None else routing.sums.cpu().numpy(),
    )


def share_of(layout: MegatronConfig, every: tuple[Sample, ...]) -> tuple[MicroBatch, ...]:
    """The rows of this replica."""
    from megatron.core import parallel_state

    masks = [sample.loss_mask for sample in every]
    shares = shares_of(masks, layout.data_parallel_size, SIZES["hidden_size"])
    rows = micro_batches(every, shares[parallel_state.get_data_parallel_rank()], MAX_TOKENS)
    return padded(rows, layout.row_count_multiple)


def place() -> tuple[int, int, int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )


def places_of_experts() -> tuple[int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


def gradients_in(network) -> list[tuple[str, np.ndarray]]:
    return [
        (placed.megatron, parameter.main_grad.cpu().numpy())
        for placed, parameter in network.pieces()
        if placed.rule.learns
    ]


class Reference(NamedTuple):
    """By sample: logprobs and entropies of its predicted tokens. By name: gradients."""

    logps: dict[int, np.ndarray]
    entropies: dict[int, np.ndarray]
    gradients: dict[str, Tensor]
    loss: float


@lru_cache
def oracle(kind: str, replays: bool = False, balances: bool = False) -> Reference:
    """replays: the routers choose what the samples of `routed_samples` say. balances: their own losses are
    added to the gradient."""
    model = model_of(kind)
    experts = [sample.extras[ROUTED_EXPERTS].values for sample in routed_samples(kind)] if replays else []
    logps, entropies, total = {}, {}, torch.zeros(())
    for number, (sample, weight) in enumerate(zip(samples(), weights(), strict=True)):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with made_to_choose(model, experts[number]) if replays else nullcontext():
            logits_TV = model(ids[None]).logits[0, :-1] / divisor(sample)[:-1]
        at = np.flatnonzero(sample.loss_mask)
        # One token at a time, the softmax of the ids that it was sampled from.
        extra, scored = sample.extras.get(KEPT_IDS), []
        for position in at:
            kept = (
                list(range(VOCAB))
                if extra is None
                else extra.lists()[position].tolist() or list(range(VOCAB))
            )
            logp_K = torch.log_softmax(logits_TV[position - 1, kept], -1)
            scored.append((logp_K[kept.index(int(ids[position]))], -(logp_K.exp() * logp_K).sum()))
        logp_N, entropy_N = (torch.stack(values) for values in zip(*scored, strict=True))
        total = total + (torch.from_numpy(weight[at]) * (ENTROPY * entropy_N - logp_N)).sum()
        logps[number], entropies[number] = logp_N.detach().numpy(), entropy_N.detach().numpy()
    total.backward()
    if balances:
        balance, squares = router_losses(model, samples())
        (AUX * balance + Z * squares).backward()
    gradients = checkpoint_of(model, {name: parameter.grad for name, parameter in model.named_parameters()})
    return Reference(logps, entropies, gradients, total.item())


def put_together(kind: str, layout: MegatronConfig, parts: list[Part]) -> Reference:
    """What all ranks have; where several have the same, they must agree."""
    last = layout.pipeline_model_parallel_size - 1
    telling = [part for part in parts if part.place[:2] == (0, last) and part.place[3] == 0]
    return Reference(
        _by_sample([(members, logp) for part in telling for members, logp, _ in part.logps]),
        _by_sample([(members, entropy) for part in telling for members, _, entropy in part.logps]),
        gradients_of(kind, shape_of(model_of(kind).config), layout, parts),
        sum(part.loss for part in telling),
    )


def gradients_of(kind: str, shape: Shape, layout: MegatronConfig, parts: list[Part]) -> dict[str, Tensor]:
    """Every parameter's gradient under its Hugging Face name, made of all ranks' shards."""
    sizes = dict(tensor_shapes_of(shape, model_of(kind).config))
    sizes[VALUE_HEAD] = (1, SIZES["hidden_size"])
    gradients: dict[str, Tensor] = {}
    for placed in (placed for placed in shape.rules() if placed.rule.learns):
        ranks = layout.sharding_ranks(placed.expert)
        # Experts may have one tensor together.
        tensors = [gradients.setdefault(name, torch.full(sizes[name], torch.nan)) for name in placed.hf]
        for rank in range(ranks):
            having = [part for part in parts if _has(part, placed, rank, layout, shape)]
            shard = _agreed(having, placed.megatron)
            unshard(placed.rule, shard, Run(rank, ranks), tensors, shape.dims(ranks))
    return gradients


def _has(part: Part, placed: Placed, rank: int, layout: MegatronConfig, shape: Shape) -> bool:
    """Whether a rank has, on its stage, the shard of tensor rank `rank`."""
    if placed.expert is None:
        return part.place[0] == rank
    own = shape.num_experts // layout.expert_model_parallel_size
    return part.experts == (placed.expert // own, rank)


def _agreed(parts: list[Part], name: str) -> Tensor:
    """A shard of a gradient, as all replicas, context ranks and ends of a pipeline have it."""
    shards = [
        torch.from_numpy(gradient) for part in parts for which, gradient in part.gradients if which == name
    ]
    for other in shards[1:]:
        torch.testing.assert_close(other, shards[0], rtol=1e-5, atol=1e-6)
    return shards[0]


def _by_sample(rows) -> dict[int, np.ndarray]:
    """Each sample's predicted tokens; a sample that two replicas tell, or none, is a mistake."""
    sizes = {number: int(sample.loss_mask.sum()) for number, sample in enumerate(samples())}
    by_sample: dict[int, np.ndarray] = {}
    for members, values in rows:
        ends = np.cumsum([sizes[member] for member in members if len(values)])
        for member, part in zip(members, np.split(values, ends[:-1]), strict=False):
            assert not len(part) or member not in by_sample, "two replicas told the same sample"
            by_sample |= {member: part} if len(part) else {}
    assert by_sample.keys() == sizes.keys(), "a sample that nobody told"
    return by_sample
