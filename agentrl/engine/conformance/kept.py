"""The checks of the ids that top-k and top-p kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from agentrl.engine.conformance.subject import Subject, expect
from agentrl.types import KEPT_IDS, Completion, NumberArray
from agentrl.types.seams import Sampling

_TEMPERATURE = 1.3
_TOKENS = 12


async def kept_ids(subject: Subject) -> None:
    """With top-k, with both, and with a k of 1, after which nothing is left to chance."""
    for number, rule in enumerate(
        (_rule(top_k=4), _rule(top_k=12, top_p=0.7), _rule(top_k=12, top_p=0.999), _rule(top_k=1))
    ):
        completion = await subject.sample(number, rule)
        _expect_kept(subject, subject.prompt(number), completion, rule)
    expect(bool((np.abs(completion.logprobs) <= 1e-6).all()), "the only token that is kept has logprob 0")
    plain = await subject.sample(9, replace(rule, top_k=4, return_kept_ids=False))
    expect(KEPT_IDS not in plain.extras, "kept ids that were not asked for were returned")
    uncut = await subject.sample(10, replace(rule, top_k=0))
    expect(KEPT_IDS not in uncut.extras, "where nothing is cut, there are no kept ids")
    greedy = await subject.sample(11, replace(rule, top_k=4, temperature=0.0))
    expect(KEPT_IDS not in greedy.extras, "greedy sampling cuts nothing, so it has no kept ids")


async def kept_ids_of_top_p(subject: Subject) -> None:
    """Where only top-p cuts."""
    for number, top_p in enumerate((0.2, 0.8)):
        rule = _rule(top_p=top_p)
        _expect_kept(subject, subject.prompt(number), await subject.sample(number, rule), rule)


async def continued_with_kept_ids(subject: Subject) -> None:
    """A completion that goes on has the kept ids of its tokens before."""
    rule = _rule(top_k=6)
    begun = await subject.sample(1, rule)
    longer = replace(rule, max_new_tokens=_TOKENS + 5, continues=begun)
    whole = await subject.engine.generate(subject.prompt(1), longer, session="longer")
    _expect_kept(subject, subject.prompt(1), whole, longer)
    kept, before = whole.extras[KEPT_IDS].lists(), begun.extras[KEPT_IDS].lists()
    same = all(np.array_equal(a, b) for a, b in zip(kept, before, strict=False))
    expect(same, "a completion that goes on has lost the kept ids of its first tokens")


def _rule(*, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(_TOKENS, _TEMPERATURE, top_p, top_k, seed=5, return_kept_ids=True)


def _expect_kept(subject: Subject, prompt: Sequence[int], completion: Completion, rule: Sampling) -> None:
    """Compare kept ids and logprobs with the rule, applied to the reference."""
    extra = completion.extras.get(KEPT_IDS)
    if extra is None or extra.offsets is None or extra.values.dtype != np.int32:
        spec = None if extra is None else extra.spec
        expect(False, f"the extra `{KEPT_IDS}` has to be ragged and int32, it is {spec}")
        return
    ids = [*prompt, *completion.token_ids.tolist()]
    rows = subject.logits(ids, 0)[len(prompt) - 1 : -1]
    for row, token, logprob, kept in zip(
        rows, completion.token_ids.tolist(), completion.logprobs.tolist(), extra.lists(), strict=True
    ):
        expect(token in kept, f"token {token} was sampled, and is not among the kept ids")
        expect(len(set(kept.tolist())) == len(kept), "an id is kept twice")
        scaled = row.astype(np.float64) / rule.temperature
        logp = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        _expect_rule(logp, kept, rule, subject.tolerance)
        expected = logp[token] - np.log(np.exp(logp[kept.astype(np.int64)]).sum())
        expect(
            abs(expected - logprob) <= 2 * subject.tolerance,
            f"a token that was sampled among {len(kept)} ids has logprob {logprob:.6f}; renormalised over "
            f"them it is {expected:.6f}",
        )


def _expect_rule(logp: npt.NDArray[np.float64], kept: NumberArray, rule: Sampling, tolerance: float) -> None:
    """Expect what the rule keeps; what is within the tolerance of its bounds may be in or out."""
    order = np.argsort(-logp)
    ordered = np.exp(logp[order])
    before = ordered.cumsum() - ordered
    last = logp[order[min(rule.top_k or len(order), len(order)) - 1]]
    margin = tolerance * (1 + rule.top_p)
    surely = (logp[order] > last + tolerance) & (before < rule.top_p - margin)
    maybe = (logp[order] >= last - tolerance) & (before <= rule.top_p + margin)
    maybe[0] = surely[0] = True
    held = set(kept.tolist())
    expect(
        set(order[surely].tolist()) <= held <= set(order[maybe].tolist()),
        f"{rule.top_k=} {rule.top_p=} keep {order[maybe].tolist()} at most, the engine {sorted(held)}",
    )
