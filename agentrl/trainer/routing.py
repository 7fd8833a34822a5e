"""Routing replay: whose experts count in a pass of the trainer, which it took, and how it spreads its tokens.

R3: the experts that the engine took (https://arxiv.org/abs/2510.11370). R2: those of the trainer's own pass
before the first update (https://arxiv.org/abs/2507.18071). Weights of their outputs are always computed from
the trainer's own scores. A token whose experts are unknown is routed by the trainer itself.

t: the tokens that one rank computes of a row; T: those of the row. L: layers of experts; k: experts of a
token in each; E: experts of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import TrainerError, UserError
from agentrl.losses import to_device
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.config import TrainerConfig
from agentrl.types import ROUTED_EXPERTS, UNKNOWN_EXPERT, BoolArray, ExpertLayers, RoutedArray, Sample

RouterReplay: TypeAlias = Literal["R2", "R3"]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_OTHER, _KNOWN, _ENTROPY, _TOKENS, _BALANCE, _SQUARES, _FIXED = range(7)
"""Columns of the sums of a layer; those after are the tokens of each expert."""


class RoutedPart(NamedTuple):
    """The experts that some tokens of a sample went through, in some layers.

    sample: its index. positions: int64 [n], of the tokens. layers: places among the layers of experts.
    experts: int16 [n, layers, k].
    """

    sample: int
    positions: Int64Array
    layers: tuple[int, ...]
    experts: RoutedArray


class RoutedReport(NamedTuple):
    """The experts of tokens that a rank reports. layers: of the model. parts: of its tokens and layers."""

    layers: ExpertLayers
    parts: Sequence[RoutedPart]


class RouterLosses(NamedTuple):
    """Losses of routers that are added to that of the algorithm; 0 = off. Both are sums over layers.

    aux: weight of the load balance of each sequence, E x sum over experts of f x P: f is the share of its
    pairs of a token and an expert, P the mean probability (https://arxiv.org/abs/2101.03961). z: weight of
    the square of the logsumexp of each token's logits (https://arxiv.org/abs/2202.08906).
    """

    aux: float
    z: float

    @classmethod
    def of(cls, config: TrainerConfig, masks: Sequence[BoolArray]) -> RouterLosses:
        """Those of one optimizer step: means over its sequences, and over their tokens.

        masks: of all samples of the step, which go through the model up to the last token that they predict.
        """
        lengths = [int(np.flatnonzero(mask)[-1]) for mask in masks if mask.any()]
        return cls(
            config.moe_aux_loss_coeff / max(len(lengths), 1), config.moe_z_loss_coeff / max(sum(lengths), 1)
        )


NO_LOSSES = RouterLosses(0.0, 0.0)


class RankTokens(NamedTuple):
    """The tokens that a rank computes of a row.

    index_t: the index of each among the row's T tokens; -1 = it is padding. places_T: where each of the row's
    tokens is among them, -1 = another rank has it. None = each of `index_t` is one of them.
    """

    index_t: Int64Array
    places_T: Int64Array | None = None

    def inverse(self, length: int) -> Int64Array:
        """`places_T`, derived where it was left out. length: T."""
        if self.places_T is not None:
            return self.places_T
        places_T = np.full(length, -1)
        (own,) = np.nonzero(self.index_t >= 0)
        places_T[self.index_t[own]] = own
        return places_T


class RoutedRow:
    """What happens to the choices of routers while a row goes through the layers of one rank.

    Under recomputation a layer runs twice: it takes the same experts, and is counted once.
    """

    def __init__(self, owner: PassRouting, micro: MicroBatch, own: RankTokens) -> None:
        self.micro, self.own = micro, own
        self.taken: dict[int, Tensor] = {}
        self._owner = owner
        self._seen: set[int] = set()
        self._summed: set[int] = set()
        is_real = len(micro.predictor_N) > 0
        self._engines = self._of(micro.routed_T) if is_real else None
        replayed_T = micro.replayed_T if owner.replay == "R2" else None
        self._replayed = self._of(replayed_T) if is_real else None
        if owner.replay == "R3":
            self._replayed = self._engines
        counts_t = np.zeros(len(own.index_t))
        if is_real:
            places_T = own.inverse(len(micro.input_ids_T))
            counts_t = np.bincount(places_T[places_T >= 0], minlength=len(counts_t)).astype(np.float64)
        # How many of the row's tokens each stands for.
        self._counts_t = to_device(counts_t, owner.device)
        self._sequences = _Sequences.of(micro, own, owner.device) if is_real and owner.has_losses else None

    def chosen(self, layer: int, own_tk: Tensor) -> Tensor:
        """The experts that count, int64 [t, k], in place of the router's own.

        layer: its place among the layers of experts.
        """
        if layer not in self._seen and self._engines is not None:
            self._compare(layer, own_tk)
        if self._replayed is None:
            return own_tk
        given_tk = self._replayed[:, layer]
        return torch.where(given_tk < 0, own_tk, given_tk)

    def scored(self, layer: int, logits_tE: Tensor, chosen_tk: Tensor, weights_tk: Tensor) -> Tensor:
        """The weights of the experts' outputs; a backward pass through them adds the gradient of the losses.

        logits: of the router. chosen: the experts that counted.
        """
        if layer not in self._seen:
            self._seen.add(layer)
            self._count(layer, logits_tE, chosen_tk)
        if self._sequences is None or not torch.is_grad_enabled():
            return weights_tk
        terms = self._sequences.terms(self._owner, logits_tE, chosen_tk)
        # Where a layer is recomputed, its first pass may have been without a gradient.
        if layer not in self._summed:
            self._summed.add(layer)
            self._owner.sums[layer, _BALANCE : _SQUARES + 1] += terms.detach().double()
        aux, z = self._owner.losses
        return _with_gradient(weights_tk, aux * terms[0] + z * terms[1])

    def _count(self, layer: int, logits_tE: Tensor, chosen_tk: Tensor) -> None:
        if self._owner.records:
            self.taken[layer] = chosen_tk.detach().to(torch.int16)
        with torch.no_grad():
            probs_tE = self._owner.probs_of(logits_tE.detach().float())
            entropies_t = -torch.xlogy(probs_tE, probs_tE).sum(-1).double()
            sums = self._owner.sums[layer]
            sums[_ENTROPY] += (entropies_t * self._counts_t).sum()
            sums[_TOKENS] += self._counts_t.sum()
            of_pairs = self._counts_t[:, None].expand_as(chosen_tk).flatten()
            sums[_FIXED:].index_add_(0, chosen_tk.detach().flatten(), of_pairs)

    def _compare(self, layer: int, own_tk: Tensor) -> None:
        assert self._engines is not None
        engines_tk = self._engines[:, layer]
        known_t = (engines_tk >= 0).all(-1) * self._counts_t
        differs_t = (own_tk.sort(-1).values != engines_tk.sort(-1).values).any(-1)
        self._owner.sums[layer, _KNOWN] += known_t.sum()
        self._owner.sums[layer, _OTHER] += (known_t * differs_t).sum()

    def _of(self, rows_TLk: RoutedArray | None) -> Tensor | None:
        if rows_TLk is None:
            return None
        self._owner.check(rows_TLk)
        padded = np.concatenate([rows_TLk, np.full_like(rows_TLk[:1], UNKNOWN_EXPERT)])
        return to_device(padded[self.own.index_t].astype(np.int64), self._owner.device)


class _Sequences(NamedTuple):
    """The row's tokens that a rank has, by their sequences.

    places: int64 [n], where each is among the rank's t tokens. numbers: int64 [n], of their sequences in the
    row. sizes: [S], tokens of each sequence, over all ranks.
    """

    places: Tensor
    numbers: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, micro: MicroBatch, own: RankTokens, device: torch.device) -> _Sequences:
        """Those of a row."""
        places_T = own.inverse(len(micro.input_ids_T))
        numbers_T = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
        (mine,) = np.nonzero(places_T >= 0)
        sizes = np.array(micro.lengths, np.float64)
        return cls(*(to_device(array, device) for array in (places_T[mine], numbers_T[mine], sizes)))

    def terms(self, owner: PassRouting, logits_tE: Tensor, chosen_tk: Tensor) -> Tensor:
        """[2]: this rank's parts of the load balance of all sequences, and of the squares of all tokens."""
        logits_nE = logits_tE.float().index_select(0, self.places)
        probs_nE, chosen_nk = owner.probs_of(logits_nE), chosen_tk.index_select(0, self.places)
        experts = logits_nE.shape[1]
        pairs_SE = probs_nE.new_zeros(len(self.sizes) * experts)
        at = (self.numbers[:, None] * experts + chosen_nk).flatten()
        pairs_SE = pairs_SE.index_add(0, at, torch.ones_like(at, dtype=pairs_SE.dtype))
        # Other ranks have other tokens of these sequences.
        pairs_SE = owner.total(pairs_SE).view(-1, experts)
        sizes_S = self.sizes.to(probs_nE.dtype)
        factors_SE = experts * pairs_SE / (chosen_nk.shape[1] * sizes_S**2)[:, None]
        balance = (factors_SE.index_select(0, self.numbers) * probs_nE).sum()
        return torch.stack([balance, logits_nE.logsumexp(-1).square().sum()])


class _Adding(torch.autograd.Function):
    """Weights as they are; their gradient arrives with that of a loss."""

    @staticmethod
    def forward(_ctx: torch.autograd.function.FunctionCtx, weights_tk: Tensor, _loss: Tensor) -> Tensor:
        return weights_tk.view_as(weights_tk)

    @staticmethod
    def backward(_ctx: torch.autograd.function.FunctionCtx, gradient_tk: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_tk, torch.ones((), device=gradient_tk.device)


_with_gradient: Callable[[Tensor, Tensor], Tensor] = _Adding.apply


def _alone(total: Tensor) -> Tensor:
    return total


class RouterFacts(NamedTuple):
    """The routers of a model on a rank.

    layers: of experts. experts: of each (count). device: where the rank computes. is_sigmoid: their scores
    are sigmoids of their logits, not a softmax of them. total: sums a tensor over the ranks that have tokens
    of the same sequences.
    """

    layers: ExpertLayers
    experts: int
    device: torch.device
    is_sigmoid: bool
    total: Callable[[Tensor], Tensor] = _alone


class PassRouting:
    """The routing of all rows of one call: of a network that scores samples, or learns from them.

    Args:
        facts: of the model's routers.
        replay: whose experts count; None = the trainer's own.
        records: keep what the tokens went through, for `routed`.
        losses: of routers, where the pass learns.
    """

    def __init__(
        self,
        facts: RouterFacts,
        replay: RouterReplay | None = None,
        *,
        records: bool = False,
        losses: RouterLosses = NO_LOSSES,
    ) -> None:
        self.layers, self._experts, self.device, self._is_sigmoid, self.total = facts
        self.replay, self.records, self.losses = replay, records, losses
        size = (len(self.layers.numbers), _FIXED + self._experts)
        self.sums = torch.zeros(size, dtype=torch.float64, device=self.device)
        self._rows: list[RoutedRow] = []

    @property
    def has_losses(self) -> bool:
        """Whether any is on."""
        return any(self.losses)

    def row(self, micro: MicroBatch, own: RankTokens) -> RoutedRow:
        """What the routers ask while a row goes through them."""
        routed = RoutedRow(self, micro, own)
        if self.records and len(micro.predictor_N):
            self._rows.append(routed)
        return routed

    def probs_of(self, logits_tE: Tensor) -> Tensor:
        """Probabilities that sum to 1 over the experts."""
        if not self._is_sigmoid:
            return logits_tE.softmax(-1)
        scores_tE = logits_tE.sigmoid()
        return scores_tE / scores_tE.sum(-1, keepdim=True)

    def check(self, rows_TLk: RoutedArray) -> None:
        """Check that experts of tokens are those of this model.

        Raises:
            TrainerError: they are not.
        """
        expected = (len(self.layers.numbers), self.layers.k)
        if rows_TLk.shape[1:] != expected or rows_TLk.max(initial=UNKNOWN_EXPERT) >= self._experts:
            layers, k = rows_TLk.shape[1:]
            raise TrainerError(
                f"the engine's tokens have {k} experts in {layers} layers, up to number "
                f"{rows_TLk.max(initial=0)}; here a token takes {expected[1]} of {self._experts} in "
                f"{expected[0]} layers: engine and trainer must have one model."
            )

    def routed(self) -> RoutedReport | None:
        """What the tokens of all rows went through, on this rank; None = it is not kept."""
        if not self.records:
            return None
        rows = [row for row in self._rows if row.taken]
        if not rows:
            return RoutedReport(self.layers, [])
        # All rows are flat, one after the other: the device is waited for once.
        taken = [torch.stack([row.taken[layer] for layer in sorted(row.taken)], 1) for row in rows]
        flat: RoutedArray = torch.cat([part.flatten() for part in taken]).cpu().numpy()
        arrays = np.split(flat, np.cumsum([part.numel() for part in taken])[:-1])
        each = zip(rows, arrays, taken, strict=True)
        parts = [part for row, array, like in each for part in _parts(row, array.reshape(like.shape))]
        return RoutedReport(self.layers, parts)


def _parts(routed: RoutedRow, taken_tLk: RoutedArray) -> Iterator[RoutedPart]:
    micro, layers = routed.micro, tuple(sorted(routed.taken))
    places_T = routed.own.inverse(len(micro.input_ids_T))
    starts = np.cumsum([0, *micro.lengths]).tolist()
    for member, start, length in zip(micro.members, starts, micro.lengths, strict=False):
        places = places_T[start : start + length]
        (positions,) = np.nonzero(places >= 0)
        yield RoutedPart(member, positions, layers, taken_tLk[places[positions]])


def put_together(reports: Sequence[RoutedReport], samples: Sequence[Sample]) -> tuple[RoutedArray, ...]:
    """The experts of each sample's tokens, [T, L, k], from what the ranks report (at least one)."""
    whole = [reports[0].layers.unknown(len(sample)) for sample in samples]
    for part in (part for report in reports for part in report.parts):
        whole[part.sample][np.ix_(part.positions, np.array(part.layers))] = part.experts
    return tuple(whole)


def check_routed(samples: Sequence[Sample], replay: RouterReplay | None) -> None:
    """Check that there is something to replay.

    Raises:
        UserError: the engine's experts are to be replayed, and no sample has any.
    """
    if replay == "R3" and samples and not any(ROUTED_EXPERTS in sample.extras for sample in samples):
        raise UserError(
            "router_replay = R3 needs the experts that the engine took, and these episodes have none: they "
            "were played without return_routed_experts; leave router_replay out."
        )


def routing_metrics(reported: Sequence[Float64Array], num_sequences: int) -> Mapping[str, float]:
    """The metrics of a step over so many sequences, from the sums of the ranks (at least one).

    moe_router_mismatch: of the tokens whose experts the engine reported, and over all layers, the share that
    the trainer's router would send to others. moe_load_imbalance: tokens of the busiest expert, relative to
    the mean of its layer; mean over layers. moe_router_entropy: of a router's probabilities, mean over tokens
    and layers (nats). With losses of routers: moe_aux_loss, the load balance, and moe_z_loss, without their
    coefficients, as means over layers.
    """
    sums = np.sum(reported, axis=0)
    loads = sums[:, _FIXED:]
    tokens_L, known = sums[:, _TOKENS], float(sums[:, _KNOWN].sum())
    if not tokens_L.all():
        return {}
    mismatch = {"moe_router_mismatch": float(sums[:, _OTHER].sum()) / known} if known else {}
    losses = {
        "moe_aux_loss": float(sums[:, _BALANCE].mean()) / num_sequences,
        "moe_z_loss": float((sums[:, _SQUARES] / tokens_L).mean()),
    }
    return {
        **mismatch,
        **(losses if sums[:, _BALANCE].any() else {}),
        "moe_load_imbalance": float((loads.max(-1) / loads.mean(-1)).mean()),
        "moe_router_entropy": float((sums[:, _ENTROPY] / tokens_L).mean()),
    }
