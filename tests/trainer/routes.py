"""A model whose routers are made to choose, by the formula of its family, without code of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from agentrl.types import REPLAYED_EXPERTS, ROUTED_EXPERTS, Extra, RoutedArray, Sample, TrainBatch
from tests.engine.routes import routers_in


def weights_of(router: torch.nn.Module, logits_tE: torch.Tensor, chosen_tk: torch.Tensor) -> torch.Tensor:
    """What a router gives the experts of each token, from its logits."""
    kind = type(router).__name__
    is_sigmoid = hasattr(router, "e_score_correction_bias") or kind.startswith("MiniMaxM2")
    scores_tE = logits_tE.float().sigmoid() if is_sigmoid else logits_tE.float().softmax(-1)
    weights = torch.stack([row[list(at)] for row, at in zip(scores_tE, chosen_tk.tolist(), strict=True)])
    if getattr(router, "norm_topk_prob", not kind.startswith("DeepseekV2")):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


@contextmanager
def made_to_choose(model: PreTrainedModel, rows_TLk: RoutedArray) -> Iterator[None]:
    """Have the routers choose these experts for the first tokens of a sequence; -1: as they would."""

    def hook_of(layer: int):
        def hook(router, _inputs, outputs):
            logits_tE, own_weights, own_tk = outputs
            given_tk = torch.from_numpy(rows_TLk[: len(own_tk), layer].astype(np.int64))
            chosen_tk = torch.where(given_tk < 0, own_tk, given_tk)
            weights = weights_of(router, logits_tE, chosen_tk).to(own_weights.dtype)
            return logits_tE, weights, chosen_tk

        return hook

    handles = [router.register_forward_hook(hook_of(layer)) for layer, router in enumerate(routers_in(model))]
    yield
    for handle in handles:
        handle.remove()


class Forced:
    """A model as `reference_gradient` calls it, with the experts of each sequence that it knows."""

    def __init__(self, model: PreTrainedModel, samples: Sequence[Sample], name: str = ROUTED_EXPERTS) -> None:
        self.model = model
        self._rows: Mapping[tuple[int, ...], RoutedArray] = {
            tuple(sample.token_ids.tolist()): sample.extras[name].values for sample in samples
        }
        assert len(self._rows) == len(samples), "two samples have the same tokens"
        self.zero_grad, self.named_parameters = model.zero_grad, model.named_parameters

    def __call__(self, input_ids, **options):
        with made_to_choose(self.model, self._rows[tuple(input_ids[0].tolist())]):
            return self.model(input_ids=input_ids, **options)


def random_rows(rng: np.random.Generator, length: int, layers: int, experts: int, k: int) -> RoutedArray:
    """Experts at random; some tokens, and always the last one, are unknown."""
    rows = np.stack(
        [[rng.choice(experts, k, replace=False) for _ in range(layers)] for _ in range(length)]
    ).astype(np.int16)
    rows[rng.random(length) < 0.2] = -1
    rows[-1] = -1
    return rows


def routed(samples: Sequence[Sample], layers: int, experts: int, k: int, seed: int = 0) -> tuple[Sample, ...]:
    """The samples, with experts at random."""
    rng = np.random.default_rng(seed)
    return tuple(
        replace(
            sample,
            extras={
                **sample.extras,
                ROUTED_EXPERTS: Extra.dense(random_rows(rng, len(sample), layers, experts, k), fill=-1),
            },
        )
        for sample in samples
    )


def with_samples(batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
    return replace(batch, samples=tuple(samples))


def replayed(samples: Sequence[Sample], rows: Sequence[RoutedArray]) -> tuple[Sample, ...]:
    """The samples with the experts of the trainer's own pass."""
    return tuple(
        replace(sample, extras={**sample.extras, REPLAYED_EXPERTS: Extra.dense(own, fill=-1)})
        for sample, own in zip(samples, rows, strict=True)
    )


def router_losses(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """The load balance, summed over layers, as a mean over sequences; and the squares, as one over tokens.

    By transformers' own function for routers of a softmax, sequence by sequence and layer by layer. It counts
    a token k times, Megatron once.
    """
    balance, squares, tokens, sequences = [], [], 0, 0
    for sample in samples:
        if not sample.loss_mask.any():
            continue
        end = int(np.flatnonzero(sample.loss_mask)[-1])
        seen: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = []
        handles = [
            router.register_forward_hook(
                lambda module, _inputs, outputs, seen=seen: seen.append((module, outputs[0], outputs[2]))
            )
            for router in routers_in(model)
        ]
        model(torch.from_numpy(sample.token_ids[None, :end].astype(np.int64)), use_cache=False)
        for handle in handles:
            handle.remove()
        sequences, tokens = sequences + 1, tokens + end
        for router, logits_tE, chosen_tk in seen:
            experts, k = logits_tE.shape[1], chosen_tk.shape[1]
            squares.append(logits_tE.double().exp().sum(-1).log().square().sum())
            is_sigmoid = hasattr(router, "e_score_correction_bias") or "MiniMaxM2" in type(router).__name__
            if not (is_sigmoid or getattr(router, "num_group", None)):
                balance.append(load_balancing_loss_func((logits_tE,), experts, k) / k)
                continue
            # transformers' function counts the best of all experts, not of some groups.
            scores = logits_tE.double().sigmoid() if is_sigmoid else logits_tE.double().softmax(-1)
            shares = [(chosen_tk == expert).sum() / chosen_tk.numel() for expert in range(experts)]
            means = (scores / scores.sum(-1, keepdim=True)).mean(0)
            balance.append(experts * sum(share * mean for share, mean in zip(shares, means, strict=True)))
    return torch.stack(balance).double().sum() / sequences, torch.stack(squares).sum() / tokens
