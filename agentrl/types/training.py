"""The input of a trainer: arrays only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.types.arrays import NO_VERSION, Author, BoolArray, FloatArray, IntArray, freeze
from agentrl.types.episode import RolloutId
from agentrl.types.extras import Extra
from agentrl.types.routing import RoutedArray


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory as arrays of one length T.

    token_ids: int32 [T]. author: int8 [T], an Author each. loss_mask: bool [T], never true for tokens of the
    world.
    logprobs: float32 [T], those of the behaviour policy: the engine's, when it sampled; 0 where not sampled.
    versions: int32 [T], of the weights that sampled the token; NO_VERSION where not sampled.
    turns: int32 [T], the turn of the agent that added the token, whoever its author is.
    temperatures: float32 [T], of the sampling, 1 where not sampled; the trainer divides its logits by them.
    extras: more arrays of T tokens by name, from the engine to the loss; see `Extra`.
    privileged_ids: int32, the first prompt as a teacher reads it, in place of all before the first sampled
    token; None = as the policy reads it.

    Raises:
        ValueError: misaligned arrays, a trainable first token, a trainable world token,
            a policy token without a logprob or a version, or turns that fall.
    """

    token_ids: IntArray
    author: npt.NDArray[np.int8]
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    turns: IntArray
    temperatures: FloatArray
    rollout_id: RolloutId
    extras: Mapping[str, Extra] = field(default_factory=dict)
    privileged_ids: IntArray | None = None

    def __post_init__(self) -> None:
        arrays = (
            *(self.token_ids, self.author, self.loss_mask, self.logprobs, self.versions, self.turns),
            self.temperatures,
        )
        if len({a.shape for a in arrays}) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"a Sample's arrays must share one length, got {[a.shape for a in arrays]}")
        if wrong := [name for name, extra in self.extras.items() if len(extra) != len(self.token_ids)]:
            raise ValueError(f"extras need a value for each of {len(self.token_ids)} tokens: {wrong}")
        if not len(self.token_ids) or self.loss_mask[0]:
            raise ValueError("a Sample needs a first token, and it is never trained on")
        if np.any(self.loss_mask & (self.author == Author.WORLD)):
            raise ValueError("the loss mask covers tokens that the world wrote")
        policy = self.author == Author.POLICY
        if np.any(policy != (self.versions != NO_VERSION)):
            raise ValueError("exactly the policy's tokens carry a version")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs[~policy] != 0):
            raise ValueError("every policy token needs a finite logprob, every other token has 0")
        if self.turns[0] < 0 or np.any(np.diff(self.turns) < 0):
            raise ValueError("turns are counted from 0, and never fall")
        for array in arrays:
            freeze(array)

    def __len__(self) -> int:
        return len(self.token_ids)


def staleness_of(versions: IntArray, served: int) -> IntArray:
    """How many versions older than the served weights tokens of these versions are; 0 where not sampled."""
    return np.where(versions == NO_VERSION, 0, served - versions).astype(np.int32)


def newest_version(samples: Sequence[Sample]) -> int:
    """The version of the newest token of the samples; NO_VERSION where none was sampled."""
    return max((int(sample.versions.max()) for sample in samples), default=NO_VERSION)


ScoreRole: TypeAlias = Literal["old", "ref", "teacher", "values"]
"""A model that scores samples: a field of `Scores`. old: the trained policy, whose field is `proximal`."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Outputs of models on samples, one float32 [T] array for each sample.

    proximal: logprobs of the policy before the first update of the batch, the denominator of the loss's
    ratios; where the trainer does not compute them, the engine's. ref, teacher: logprobs of the reference
    model and of the distillation teacher. values: the critic's estimate of the return before each token.
    entropy: of the proximal policy where it predicts the token (nats). sum_pi_squared: the sum of the squares
    of its probabilities there. None: not computed.
    ends: the critic's estimate of what would have followed a rollout that was cut off; others are left out.
    routed: the experts that tokens went through under the proximal policy, int16 [T, layers, k]
    (`REPLAYED_EXPERTS`).

    Raises:
        ValueError: their shapes differ.
    """

    proximal: tuple[FloatArray, ...]
    ref: tuple[FloatArray, ...] | None = None
    teacher: tuple[FloatArray, ...] | None = None
    values: tuple[FloatArray, ...] | None = None
    entropy: tuple[FloatArray, ...] | None = None
    sum_pi_squared: tuple[FloatArray, ...] | None = None
    ends: Mapping[RolloutId, float] = field(default_factory=dict)
    routed: tuple[RoutedArray, ...] | None = None

    @property
    def optional(self) -> tuple[tuple[FloatArray, ...] | None, ...]:
        """The arrays but `proximal`, in their order."""
        return self.ref, self.teacher, self.values, self.entropy, self.sum_pi_squared

    def at(self, indices: Sequence[int]) -> Scores:
        """The scores of some samples, by index, in that order."""

        def chosen(arrays: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
            return tuple(arrays[i] for i in indices)

        ref, teacher, values, entropy, squares = (
            None if arrays is None else chosen(arrays) for arrays in self.optional
        )
        routed = None if self.routed is None else tuple(self.routed[i] for i in indices)
        proximal = chosen(self.proximal)
        return Scores(proximal, ref, teacher, values, entropy, squares, self.ends, routed)

    def __post_init__(self) -> None:
        for other in self.optional:
            if other is not None and [a.shape for a in other] != [a.shape for a in self.proximal]:
                raise ValueError("all scores must share their shapes, sample by sample")


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """Advantages, loss weights and a critic's targets, one float32 [T] array for each sample.

    Weights are computed once for the whole optimizer step, so that the split into micro-batches cannot change
    the gradient: loss = sum over all tokens of weight x term.

    returns: the critic's targets, the return before each token; None without a critic. kl_cov: coefficients
    of a penalty for the distance from the proximal policy; None without one.

    Raises:
        ValueError: their shapes differ.
    """

    advantages: tuple[FloatArray, ...]
    weights: tuple[FloatArray, ...]
    returns: tuple[FloatArray, ...] | None = None
    kl_cov: tuple[FloatArray, ...] | None = None

    def __post_init__(self) -> None:
        for other in (self.weights, self.returns, self.kl_cov):
            if other is not None and [a.shape for a in other] != [a.shape for a in self.advantages]:
                raise ValueError("all arrays of a credit must share their shapes, sample by sample")


class Coefficients(NamedTuple):
    """Coefficients of the loss that change from step to step; None = that of the loss itself.

    entropy: of the bonus for the policy's entropy. kl: of the penalty for divergence from the reference.
    """

    entropy: float | None = None
    kl: float | None = None


UNCHANGED = Coefficients()
"""Those of the loss itself."""

FactorFunction: TypeAlias = Callable[[Sequence[Sample], Sequence[FloatArray]], tuple[FloatArray, ...]]
"""From samples and their proximal logprobs, [T] each, to factors of their advantages, float32 [T] each."""


class ProximalInStep(NamedTuple):
    """The current logprobs of a step stand for the proximal ones: it is the only one of its rollout batch.

    Both are of the same weights then, so that no pass of its own has to compute the proximal ones.

    factors: a correction, by which the trainer multiplies the advantages in the step; None = there is none.
    It is called with the samples of a micro-batch, which hold whole sequences. is_left_out_without_gradient:
    a step whose gradient is 0, since the correction masked all of its tokens, changes nothing.
    """

    factors: FactorFunction | None = None
    is_left_out_without_gradient: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """The input of one optimizer step: samples, and the scores and the credit of each.

    version: of the weights that are served meanwhile; None = that of the newest token. coefficients: of the
    loss, in this step. critic_only: the policy does not learn from it. in_step: None = the proximal logprobs
    are those of `scores`; otherwise `scores.proximal` is not used. resets_optimizer: the optimizers' means
    begin anew with this step.

    Raises:
        ValueError: they differ in number.
    """

    samples: tuple[Sample, ...]
    scores: Scores
    credit: Credit
    version: int | None = None
    coefficients: Coefficients = UNCHANGED
    critic_only: bool = False
    in_step: ProximalInStep | None = None
    resets_optimizer: bool = False

    def __post_init__(self) -> None:
        counts = (len(self.samples), len(self.scores.proximal), len(self.credit.weights))
        if len(set(counts)) != 1:
            raise ValueError(f"samples, scores and credit must match one to one, got {counts}")

    @property
    def served(self) -> int:
        """The version that staleness is relative to."""
        return newest_version(self.samples) if self.version is None else self.version

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the loss covers."""
        return int(sum(s.loss_mask.sum() for s in self.samples))
