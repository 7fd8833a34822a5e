"""Routing replay: whose experts count in a pass of the trainer, which it took, and how it spreads its tokens.

R3: the experts that the engine took (https://arxiv.org/abs/2510.11370). R2: those of the trainer's own pass
before the first update (https://arxiv.org/abs/2507.18071). Weights of their outputs are always computed from
the trainer's own scores. A token whose experts are unknown is routed by the trainer itself.

t: the tokens that one rank computes of a row; T: those of the row. L: layers of experts; k: experts of a
token in each; E: experts of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import TrainerError
from agentrl.losses import to_device
from agentrl.trainer.batch import MicroBatch
from agentrl.types import UNKNOWN_EXPERT, ExpertLayers, RoutedArray, Sample

RouterReplay: TypeAlias = Literal["R2", "R3"]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_OTHER, _KNOWN, _ENTROPY, _TOKENS, _FIXED = range(5)
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


class Routed(NamedTuple):
    """The experts of tokens that a rank reports. layers: of the model. parts: of its tokens and layers."""

    layers: ExpertLayers
    parts: Sequence[RoutedPart]


class OwnTokens(NamedTuple):
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

    def __init__(self, owner: PassRouting, micro: MicroBatch, own: OwnTokens) -> None:
        self.micro, self.own = micro, own
        self.taken: dict[int, Tensor] = {}
        self._owner = owner
        self._seen: set[int] = set()
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

    def scored(self, layer: int, logits_tE: Tensor, chosen_tk: Tensor) -> None:
        """A router's logits, and the experts that counted."""
        if layer in self._seen:
            return
        self._seen.add(layer)
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


class PassRouting:
    """The routing of all rows of one call: of a network that scores samples, or learns from them.

    Args:
        layers: the model's layers of experts. experts: of each (count).
        device: where the rank computes.
        is_sigmoid: the routers' scores are sigmoids of their logits, not a softmax of them.
        replay: whose experts count; None = the trainer's own.
        records: keep what the tokens went through, for `routed`.
    """

    def __init__(
        self,
        layers: ExpertLayers,
        experts: int,
        device: torch.device,
        *,
        is_sigmoid: bool,
        replay: RouterReplay | None = None,
        records: bool = False,
    ) -> None:
        self.layers, self.device, self.replay, self.records = layers, device, replay, records
        self._experts, self._is_sigmoid = experts, is_sigmoid
        size = (len(layers.numbers), _FIXED + experts)
        self.sums = torch.zeros(size, dtype=torch.float64, device=device)
        self._rows: list[RoutedRow] = []

    def row(self, micro: MicroBatch, own: OwnTokens) -> RoutedRow:
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

    def routed(self) -> Routed:
        """What the tokens of all rows went through, on this rank."""
        return Routed(self.layers, [part for routed in self._rows for part in _parts(routed)])


def _parts(routed: RoutedRow) -> Iterator[RoutedPart]:
    layers = tuple(sorted(routed.taken))
    if not layers:
        return
    taken_tLk: RoutedArray = torch.stack([routed.taken[layer] for layer in layers], 1).cpu().numpy()
    micro = routed.micro
    places_T = routed.own.inverse(len(micro.input_ids_T))
    starts = np.cumsum([0, *micro.lengths]).tolist()
    for member, start, length in zip(micro.members, starts, micro.lengths, strict=False):
        places = places_T[start : start + length]
        (positions,) = np.nonzero(places >= 0)
        yield RoutedPart(member, positions, layers, taken_tLk[places[positions]])


def put_together(ranks: Sequence[Routed | None], samples: Sequence[Sample]) -> tuple[RoutedArray, ...] | None:
    """The experts of each sample's tokens, [T, L, k], from what all ranks report; None = nothing."""
    reports = [routed for routed in ranks if routed is not None]
    if not reports:
        return None
    whole = [reports[0].layers.unknown(len(sample)) for sample in samples]
    for part in (part for routed in reports for part in routed.parts):
        whole[part.sample][np.ix_(part.positions, np.array(part.layers))] = part.experts
    return tuple(whole)


def routing_metrics(ranks: Sequence[Float64Array | None]) -> Mapping[str, float]:
    """The metrics of a step, from the sums of all ranks.

    moe_router_mismatch: of the tokens whose experts the engine reported, and over all layers, the share that
    the trainer's router would send to others. moe_load_imbalance: tokens of the busiest expert, relative to
    the mean of its layer; mean over layers. moe_router_entropy: of a router's probabilities, mean over tokens
    and layers (nats).
    """
    reported = [sums for sums in ranks if sums is not None]
    if not reported:
        return {}
    sums = np.sum(reported, axis=0)
    loads = sums[:, _FIXED:]
    tokens_L, known = sums[:, _TOKENS], float(sums[:, _KNOWN].sum())
    if not tokens_L.all():
        return {}
    mismatch = {"moe_router_mismatch": float(sums[:, _OTHER].sum()) / known} if known else {}
    return {
        **mismatch,
        "moe_load_imbalance": float((loads.max(-1) / loads.mean(-1)).mean()),
        "moe_router_entropy": float((sums[:, _ENTROPY] / tokens_L).mean()),
    }
