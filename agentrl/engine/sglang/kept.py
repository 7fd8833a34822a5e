"""The ids that top-k and top-p kept, from what a server reports of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agentrl.engine.config import MAX_TOP_LOGPROBS
from agentrl.engine.sglang.wire import MetaInfo
from agentrl.errors import ConfigError, EngineError
from agentrl.types import NumberArray
from agentrl.types.seams import Sampling

Likeliest = Sequence[tuple[float | None, int, str | None]]


def kept_tokens(meta: MetaInfo, sampling: Sampling) -> tuple[list[NumberArray], list[float]]:
    """The kept ids of each token of a reply, and its logprob in the distribution renormalised over them.

    Raises:
        ConfigError: the server reports neither the kept ids nor the likeliest ones.
        EngineError: it reports those of another number of tokens, or without the sampled one.
    """
    entries = meta.output_token_logprobs
    if meta.output_kept_ids is not None:
        _check_number(len(meta.output_kept_ids), len(entries))
        kept: list[NumberArray] = [np.array(ids, np.int32) for ids in meta.output_kept_ids]
        if any(entry[1] not in ids for entry, ids in zip(entries, kept, strict=True)):
            raise EngineError("the server sent kept ids without the token that was sampled; see its log.")
        return kept, [entry[0] for entry in entries]
    if meta.output_top_logprobs is None and entries:
        raise ConfigError(
            "the server does not report which tokens are kept (replay_sampling_mask); set rollout_top_k to 1 "
            f"to {MAX_TOP_LOGPROBS}, or switch replay_sampling_mask off."
        )
    top = meta.output_top_logprobs or []
    _check_number(len(top), len(entries))
    pairs = [
        _prefix(likeliest or (), entry[1], entry[0], sampling)
        for likeliest, entry in zip(top, entries, strict=True)
    ]
    return [ids for ids, _ in pairs], [logprob for _, logprob in pairs]


def _prefix(
    likeliest: Likeliest, token: int, logprob: float, sampling: Sampling
) -> tuple[NumberArray, float]:
    """The ids among the k likeliest that have at most the mass p before them, and the token's logprob.

    The token is always kept: one that is as likely as the last of them may be drawn in its place, and
    rounding may have ended the prefix before it.
    """
    kept: dict[int, float] = {}
    before = 0.0
    for logp, id_, _ in likeliest[: sampling.top_k]:
        if before > sampling.top_p or logp is None:
            break
        kept[id_] = logp
        before += math.exp(logp)
    kept[token] = logprob
    largest = max(kept.values())
    total = largest + math.log(math.fsum(math.exp(logp - largest) for logp in kept.values()))
    return np.array(sorted(kept), np.int32), logprob - total


def _check_number(reported: int, sampled: int) -> None:
    if reported != sampled:
        raise EngineError(f"the server sent {sampled} tokens, and kept ids of {reported}; see its log.")
