"""The contracts of estimators and filters, checked on small batches with the special cases of large ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.conversion import Conversion, DataPostProcess, converted, post_processed_data
from agentrl.algorithms.corrections import CorrectionFunction, as_corrected
from agentrl.algorithms.filters import (
    BufferFilter,
    GroupFilter,
    RolloutFilter,
    chosen_ids,
    is_reason,
    removed_rollouts,
)
from agentrl.algorithms.post_process import RewardPostProcess, post_processed
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.algorithms.weights import CustomWeights, WeightFunction
from agentrl.types import (
    Completion,
    Ending,
    Episode,
    Finish,
    FloatArray,
    Group,
    Limits,
    Message,
    Restart,
    Sample,
    Scores,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

_TASK = Task.ask("check_estimator", "?")
_TOLERANCE = 1e-4


class _EstimatorBatch(NamedTuple):
    groups: tuple[Group, ...]
    tokens: Tokens
    scores: TokenScores

    def __call__(self, estimator: AdvantageEstimator) -> Advantages:
        return estimator(self.groups, self.tokens, self.scores)

    @classmethod
    def of(cls, groups: Sequence[Group], samples: Sequence[Sample], scores: Scores) -> _EstimatorBatch:
        tokens = Tokens.of(samples)
        return cls(tuple(groups), tokens, tokens.scores(scores))


def check_estimator(estimator: AdvantageEstimator) -> None:
    """Check that an estimator satisfies its contract: use it in the tests of your own.

    It is run on groups of different sizes, one of them a single episode, with equal and unequal rewards,
    rewards on turns, an episode that became two samples, samples with one trainable token and with none, and
    scores of every kind; then on the same with logprobs and values that are 10 000 apart. It must

    - return `Advantages`: one finite number for each trainable token, and as many returns, if any;
    - return the same in a second call, and for the same samples and groups in another order;
    - leave its inputs unchanged.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The estimator's own errors are not
            caught.
    """
    groups, samples, scores = _parts(spread=1.0)
    batch = _EstimatorBatch.of(groups, samples, scores)
    copies = [array.copy() for array in _arrays(batch)]
    advantages = batch(estimator)
    _check_arrays(advantages, batch.tokens)
    if not all(np.array_equal(a, b) for a, b in zip(copies, _arrays(batch), strict=True)):
        raise ValueError("the estimator changed its scores in place; it must work on copies")
    first = _by_sample(batch.tokens, advantages)
    if not _are_close(first, _by_sample(batch.tokens, batch(estimator))):
        raise ValueError(
            "a second call gave the same batch other advantages; an estimator must not draw random numbers "
            "or keep state"
        )
    reversed_scores = scores.at(range(len(samples))[::-1])
    reversed_batch = _EstimatorBatch.of(groups[::-1], samples[::-1], reversed_scores)
    reordered = [arrays[::-1] for arrays in _by_sample(reversed_batch.tokens, reversed_batch(estimator))]
    if not _are_close(first, reordered):
        raise ValueError("advantages depend on the order of samples or groups; go by `Tokens.rollout_ids`")
    far = _EstimatorBatch.of(*_parts(spread=1e4))
    _check_arrays(far(estimator), far.tokens)


def check_correction(function: CorrectionFunction) -> None:
    """Check that a correction function satisfies its contract: use it in the tests of your own.

    It is called with a batch of episodes, one of which became two samples, whose logprobs of trainer and
    engine are up to a nat apart; then with one in which they are 10 000 apart. It must return one finite
    number, not below 0, for each trainable token, and the same in a second call; its inputs stay as they are.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The function's own errors are not
            caught.
    """
    for spread in (1.0, 1e4):
        _, tokens, scores = _EstimatorBatch.of(*_parts(spread))
        copies = [array_N.copy() for array_N in scores if array_N is not None]
        first, second = (
            as_corrected(function(tokens, scores), tokens, scores).factors_N.copy() for _ in range(2)
        )
        if not np.array_equal(first, second):
            raise ValueError("a second call gave the same batch other factors; draw no random numbers")
        arrays = [array_N for array_N in scores if array_N is not None]
        if not all(np.array_equal(a, b) for a, b in zip(copies, arrays, strict=True)):
            raise ValueError("it changed its scores in place; it must work on copies")


def check_reducer(function: WeightFunction) -> None:
    """Check that a loss reducer satisfies its contract: use it in the tests of your own.

    It is called with the samples of groups of different sizes, one of them an episode that became two
    samples, and some without a trainable token. It must return one finite number, not below 0, for each token
    of each sample, the same in a second call, and some weight above 0.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The function's own errors are not
            caught.
    """
    groups, _, _ = _parts(spread=1.0)
    samples = [[sample for e in group.episodes for sample in samples_of(e)] for group in groups]
    first, second = (CustomWeights(function)(samples) for _ in range(2))
    if not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
        raise ValueError("a second call gave the same samples other weights; draw no random numbers")
    if not any(weights.any() for weights in first):
        raise ValueError("all weights are 0, so nothing would be learned")


def check_group_filter(group_filter: GroupFilter) -> None:
    """Check that a dynamic sampling filter satisfies its contract: use it in the tests of your own.

    It is run on groups of different sizes, with equal and unequal rewards. It must return one word, the
    reason why a group is dropped, or None, and the same in a second call.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The filter's own errors are not
            caught.
    """
    groups, _, _ = _parts(spread=1.0)
    for group in groups:
        reason = group_filter(group)
        if reason is not None and not is_reason(reason):
            raise ValueError(
                f"a filter returns one word, why a group is dropped, or None to keep it, not {reason!r}"
            )
        _check_repeats(partial(group_filter, group))


def check_buffer_filter(buffer_filter: BufferFilter) -> None:
    """Check that a buffer filter satisfies its contract: use it in the tests of your own.

    It has to choose one, two and all of four groups of different sizes, with equal and unequal rewards, and
    the same in a second call.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The filter's own errors are not
            caught.
    """
    groups, _, _ = _parts(spread=1.0)
    for number in (1, 2, len(groups)):
        chosen_ids(buffer_filter, groups, number)
    _check_repeats(lambda: chosen_ids(buffer_filter, groups, 2))


def check_rollout_filter(rollout_filter: RolloutFilter) -> None:
    """Check that a rollout sample filter satisfies its contract: use it in the tests of your own.

    It is called with a batch of groups of different sizes, with equal and unequal rewards, and with a batch
    of one group. It must return a mapping from rollouts of the batch to one word each, and the same in a
    second call.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The filter's own errors are not
            caught.
    """
    groups, _, _ = _parts(spread=1.0)
    removed_rollouts(rollout_filter, groups[:1])
    _check_repeats(lambda: removed_rollouts(rollout_filter, groups))


def check_post_process(function: RewardPostProcess) -> None:
    """Check that a reward post-processing satisfies its contract: use it in the tests of your own.

    It is called with a batch of groups of different sizes, with equal and unequal rewards, and with a batch
    of one group. It must return a mapping from rollouts of the batch to one finite number each, and the same
    in a second call.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The function's own errors are not
            caught.
    """
    groups, _, _ = _parts(spread=1.0)
    post_processed(function, groups[:1])
    post_processed(function, groups)
    _check_repeats(lambda: dict(function(groups)))


def check_conversion(function: Conversion) -> None:
    """Check that a conversion of samples satisfies its contract: use it in the tests of your own.

    It is called with groups of different sizes, one of them with an episode that became two samples, and
    some samples without a trainable token. It must return a sample for each, with the same tokens, no token
    under the loss mask that was not, all extras, and the same in a second call.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The function's own errors are not
            caught.
    """
    groups, samples, _ = _parts(spread=1.0)
    _check_alike(*(converted(function, groups, samples) for _ in range(2)))


def _check_alike(first: Sequence[Sample], second: Sequence[Sample]) -> None:
    for one, other in zip(first, second, strict=True):
        if not np.array_equal(one.loss_mask, other.loss_mask) or one.extras.keys() != other.extras.keys():
            raise ValueError("a second call decided otherwise; draw no random numbers")


def check_data_post_process(function: DataPostProcess) -> None:
    """Check that a post-processing of data satisfies its contract: use it in the tests of your own.

    It is called with samples, some without a trainable token, and with logprobs of the trainer that are up to
    a nat from the engine's. What it must return is as for a conversion.

    Raises:
        ValueError: the contract is violated; the message is one sentence. The function's own errors are not
            caught.
    """
    _, samples, scores = _parts(spread=1.0)
    _check_alike(*(post_processed_data(function, samples, scores) for _ in range(2)))


def small_groups() -> tuple[Group, ...]:
    """Groups of different sizes, with equal and unequal rewards, to try a function on."""
    return _parts(spread=1.0)[0]


def _check_repeats(decide: Callable[[], object]) -> None:
    if decide() != decide():
        raise ValueError("a second call decided otherwise; a filter must not draw random numbers")


def _check_arrays(advantages: Advantages, tokens: Tokens) -> None:
    if not isinstance(advantages, Advantages):
        raise ValueError(
            f"an estimator returns Advantages, not {type(advantages).__name__}; wrap it: Advantages(array)"
        )
    arrays = {"advantages": advantages.advantages_N, "returns": advantages.returns_N}
    for name, array in arrays.items():
        if array is None:
            continue
        if array.shape != (len(tokens),):
            raise ValueError(
                f"{name} must hold one number for each of the {len(tokens)} tokens, got {array.shape}"
            )
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"{name} hold numbers that are not finite; bound ratios and guard divisions by 0"
            )


def _by_sample(tokens: Tokens, advantages: Advantages) -> list[tuple[FloatArray, ...]]:
    """Advantages and returns, sample by sample."""
    both = (advantages.advantages_N, advantages.returns_N)
    return [tokens.scatter(array_N) for array_N in both if array_N is not None]


def _are_close(expected: Sequence[Sequence[FloatArray]], actual: Sequence[Sequence[FloatArray]]) -> bool:
    return len(expected) == len(actual) and all(
        np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(np.abs(a).max(initial=0.0)))
        for arrays in zip(expected, actual, strict=True)
        for a, b in zip(*arrays, strict=True)
    )


def _arrays(batch: _EstimatorBatch) -> list[Floats]:
    return [array_N for array_N in batch.scores if array_N is not None]


def _parts(spread: float) -> tuple[tuple[Group, ...], tuple[Sample, ...], Scores]:
    """spread: the largest difference, in nats, of scores from the engine's logprobs."""
    groups = (
        _group("a", totals=(1.0, 0.0, 2.0), lengths=((2, 3), (1, 2, 1), (4,)), split="a.1"),
        _group("b", totals=(1.0, 1.0), lengths=((1,), (0,))),
        _group("c", totals=(0.0,), lengths=((2, 0),)),
        _group("d", totals=(1.0, 0.0, 0.0, 0.0), lengths=((1, 1), (3,), (0, 2), (2, 2))),
    )
    samples = tuple(s for group in groups for e in group.episodes for s in samples_of(e))
    rng = np.random.default_rng(0)

    def near() -> tuple[FloatArray, ...]:
        noise = (rng.uniform(-spread, spread, len(sample)) for sample in samples)
        return tuple((s.logprobs + n).astype(np.float32) for s, n in zip(samples, noise, strict=True))

    proximal = near()
    entropy = tuple(rng.uniform(0.0, 2.0, len(sample)).astype(np.float32) for sample in samples)
    pi = [np.exp(np.minimum(logprobs, 0.0)) for logprobs in proximal]
    squares = tuple((p**2 + rng.random(len(p)) * (1.0 - p) ** 2).astype(np.float32) for p in pi)
    return groups, samples, Scores(proximal, near(), near(), near(), entropy, squares)


def _group(id: str, totals: Sequence[float], lengths: Sequence[Sequence[int]], split: str = "") -> Group:
    """lengths: the policy's tokens in each turn of each episode (count); the last of four was truncated."""
    episodes = tuple(_episode(f"{id}.{i}", turn_lengths, split) for i, turn_lengths in enumerate(lengths))
    verdicts = tuple(
        Verdict(e.id, "check_estimator", total, turn_rewards=(0.5, *[None] * (len(e.turns) - 1)))
        for e, total in zip(episodes, totals, strict=True)
    )
    return Group(id, _TASK, 0, episodes, verdicts)


def _episode(id: str, lengths: Sequence[int], split: str) -> Episode:
    turns = tuple(_turn(length, step) for step, length in enumerate(lengths))
    one_trajectory = (Trajectory(turns),)
    two_trajectories = (Trajectory(turns[:1]), Trajectory(turns[1:], 0, Restart.COMPACTED))
    return Episode(
        id=id,
        env_id="check_estimator",
        task=_TASK,
        seed=0,
        limits=Limits(),
        trajectories=two_trajectories if id == split else one_trajectory,
        step_rewards=(),
        ending=Ending.TRUNCATED if id.endswith(".3") else Ending.COMPLETED,
        # Events that did not happen are 0, as they are in the environments that count them.
        counts=Counter(),
    )


def _turn(length: int, step: int) -> Turn:
    ids = np.arange(length, dtype=np.int32)
    completion = Completion(
        ids, np.linspace(-1, -0.1, length, dtype=np.float32), np.zeros(length, np.int32), Finish.STOP
    )
    world_ids = np.zeros(2, dtype=np.int32)
    return Turn((Message("user", "?"),), Message("assistant", "!"), TurnTokens(world_ids, completion), step)
