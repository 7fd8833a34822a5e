"""The policy losses as papers write them: Python floats, one token after the other, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from agentrl.losses import LossInputs, TokenOutputs


class Token(NamedTuple):
    """All that is known of one token."""

    sequence: int
    logp: float
    old: float
    engine: float
    ref: float
    advantage: float
    weight: float
    entropy: float = 0.5
    held: float = 0.0


class Options(NamedTuple):
    """What a loss is told, under names of its own."""

    objective: str = "clip"
    low: float = 0.2
    high: float = 0.28
    ceiling: float | None = None
    bonus: float = 0.0
    kl: tuple[str, float, bool] | None = None
    delta: float | None = None
    tau: tuple[float, float] = (1.0, 1.05)
    kernels: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))


def mean_over_sequence(tokens: Sequence[Token], values: Sequence[float], sequence: int) -> float:
    own = [value for token, value in zip(tokens, values, strict=True) if token.sequence == sequence]
    return math.fsum(own) / len(own)


def between(x: float, least: float, most: float) -> float:
    return least if x < least else most if x > most else x


def kl_of(kind: str, token: Token, unbiased: bool) -> float:
    """https://arxiv.org/abs/2402.03300, equation 4, and its siblings; q is the reference's odds."""
    q = math.exp(token.ref - token.logp)
    value = {
        "k1": -math.log(q),
        "k2": math.log(q) ** 2 / 2,
        "k3": q - math.log(q) - 1,
        "low_var_kl": between(q - math.log(q) - 1, -10, 10),
    }[kind]
    return value * math.exp(token.logp) / math.exp(token.old) if unbiased else value


def bounded_gap(gap: float, advantage: float, options: Options) -> float:
    """https://arxiv.org/abs/2507.20673: the pessimistic side of a log-ratio is not bounded."""
    return min(gap, options.high) if advantage >= 0 else max(gap, -options.low)


def leaves_region(token: Token, options: Options) -> bool:
    """https://arxiv.org/abs/2602.04879, equation 12: two outcomes, this token and all the others."""
    p, q = min(math.exp(token.logp), 1.0), min(math.exp(token.engine), 1.0)
    distance = abs(p - q)
    if options.objective == "dppo_kl":
        others = 0.0 if q == 1 else math.inf if p == 1 else (1 - q) * math.log((1 - q) / (1 - p))
        distance = q * math.log(q / p) + others
    above, below = distance > options.high, distance > options.low
    return (token.advantage > 0 and p > q and above) or (token.advantage < 0 and p < q and below)


def gmpo(token: Token, frozen: Sequence[Token], index: int, options: Options):
    gaps = [bounded_gap(t.logp - t.old, t.advantage, options) for t in frozen]
    moved = bounded_gap(token.logp - token.old, token.advantage, options) - gaps[index]
    mean = math.exp(mean_over_sequence(frozen, gaps, token.sequence))
    is_bounded = gaps[index] != frozen[index].logp - frozen[index].old
    return -token.advantage * mean * math.exp(moved), is_bounded, False


def sapo(token: Token, frozen: Sequence[Token], index: int, options: Options):
    """https://arxiv.org/abs/2511.20347: a sigmoid of the ratio."""
    tau = options.tau[0 if token.advantage > 0 else 1]
    ratio = math.exp(token.logp) / math.exp(token.old)
    return -token.advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), False, False


def vespo(token: Token, frozen: Sequence[Token], index: int, options: Options):
    """https://arxiv.org/abs/2602.10693: a gamma density of the ratio of the whole sequence, 1 at 1."""
    k, lam = options.kernels[0 if token.advantage >= 0 else 1]
    w = math.prod(math.exp(t.logp) / math.exp(t.old) for t in frozen if t.sequence == token.sequence)
    return -(w**k) * math.exp(lam - lam * w) * token.advantage * token.logp, False, False


def dppo(token: Token, frozen: Sequence[Token], index: int, options: Options):
    ratio = math.exp(frozen[index].logp) / math.exp(token.old)
    weight = min(ratio, options.ceiling or 20.0)
    is_masked = leaves_region(frozen[index], options)
    return (0.0 if is_masked else -weight * token.advantage * token.logp), is_masked, weight != ratio


def reinforce(token: Token, frozen: Sequence[Token], index: int, options: Options):
    return -token.advantage * token.logp, False, False


NEWER = {
    "gmpo": gmpo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo,
    "dppo_kl": dppo,
    "reinforce": reinforce,
}


def policy_of(tokens: Sequence[Token], frozen: Sequence[Token], index: int, options: Options):
    """The policy term of a token, and whether the clip and the dual clip decided it."""
    token, before = tokens[index], frozen[index]
    advantage = token.advantage
    ratio = math.exp(token.logp) / math.exp(token.old)
    if options.objective == "gspo":
        gaps = [t.logp - t.old for t in frozen]
        sequence = math.exp(mean_over_sequence(frozen, gaps, token.sequence))
        ratio = sequence * math.exp(token.logp) / math.exp(before.logp)
    if options.objective == "cispo":
        ratio = math.exp(before.logp) / math.exp(token.old)
        weight = between(ratio, 1 - options.low, 1 + options.high)
        return -weight * advantage * token.logp, weight != ratio, False
    if options.objective in NEWER:
        return NEWER[options.objective](token, frozen, index, options)
    bounded = between(ratio, 1 - options.low, 1 + options.high)
    objective = min(ratio * advantage, bounded * advantage)
    clipped = bounded * advantage < ratio * advantage
    if options.ceiling is not None and advantage < 0 and objective < options.ceiling * advantage:
        return -options.ceiling * advantage, clipped, True
    return -objective, clipped, False


def evaluate(tokens: Sequence[Token], options: Options, frozen: Sequence[Token] | None = None):
    """Sums by name. frozen: where everything under a stop-gradient is read off."""
    frozen = tokens if frozen is None else frozen
    names = ("loss", "pg", "clipped", "dual", "kl", "dropped", "old_kl", "gap", "entropy", "held")
    sums = dict.fromkeys(names, 0.0)
    gaps = [token.engine - token.logp for token in frozen]
    for index, token in enumerate(tokens):
        term, clipped, dual = policy_of(tokens, frozen, index, options)
        far = options.delta is not None and mean_over_sequence(frozen, gaps, token.sequence) > options.delta
        dropped = far and token.advantage < 0
        policy = 0.0 if dropped else term
        kl = 0.0 if options.kl is None else kl_of(options.kl[0], token, options.kl[2])
        coef = 0.0 if options.kl is None else options.kl[1]
        # https://arxiv.org/abs/2505.22617, KL-Cov; a difference of 1e-4 is rounding.
        held = token.held * max(abs(token.logp - token.old) - 1e-4, 0.0)
        sums["loss"] += token.weight * (policy - options.bonus * token.entropy + coef * kl + held)
        sums["held"] += held
        sums["pg"] += policy
        sums["clipped"] += clipped
        sums["dual"] += dual
        sums["kl"] += kl
        sums["dropped"] += dropped
        sums["old_kl"] += token.old - token.logp
        sums["gap"] += abs(token.logp - token.engine)
        sums["entropy"] += token.entropy
    return sums


def slopes(tokens: Sequence[Token], options: Options, step: float = 1e-6) -> list[float]:
    """Finite differences of the loss with respect to each logp."""

    def at(index: int, by: float) -> float:
        moved = list(tokens)
        moved[index] = tokens[index]._replace(logp=tokens[index].logp + by)
        return evaluate(moved, options, frozen=tokens)["loss"]

    return [(at(index, step) - at(index, -step)) / (2 * step) for index in range(len(tokens))]


def tensors(tokens: Sequence[Token], dtype: torch.dtype = torch.float64) -> tuple[TokenOutputs, LossInputs]:
    """The same tokens as a loss is given them; logprobs and entropies are leaves."""

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    outputs = TokenOutputs(column("logp").requires_grad_(), column("entropy").requires_grad_())
    inputs = LossInputs(
        proximal_logp_N=column("old"),
        behaviour_logp_N=column("engine"),
        advantages_N=column("advantage"),
        weights_N=column("weight"),
        sequence_N=torch.tensor([token.sequence for token in tokens], dtype=torch.int64),
        ref_logp_N=column("ref"),
        kl_cov_N=column("held") if any(token.held for token in tokens) else None,
    )
    return outputs, inputs
