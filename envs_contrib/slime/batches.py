"""slime's functions over groups and batches, as functions of agentrl by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev

from agentrl import UserError
from agentrl.types import Group, RolloutId, Verdict
from envs_contrib.slime.loading import Arguments, Function, loaded
from envs_contrib.slime.sample import HasRewardKey, Sample, sample_of

_SMALLEST_STD = 1e-6


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept, and why not. keep_when_insufficient: without effect, another one is played."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(
    args: HasRewardKey, samples: Sequence[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    del kwargs
    rewards = [float(str(sample.get_reward_value(args))) for sample in samples]
    keep = pstdev(rewards) > _SMALLEST_STD
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def filter_of(
    function: Function | str, *, args: Mapping[str, object] | None = None
) -> Callable[[Group], str | None]:
    """A `dynamic_sampling_filter_path` by slime's: `(args, samples) -> DynamicFilterOutput` or a truth value.

    args: what `args` holds, such as `reward_key`.
    """
    known = Arguments.of(args)

    def slime_filter(group: Group) -> str | None:
        output = loaded(function)(known, _samples(group, known))
        keep, reason = getattr(output, "keep", output), getattr(output, "reason", None)
        return None if keep else _word(str(reason or getattr(function, "__name__", "dropped")))

    return slime_filter


def sample_filter_of(
    function: Function | str, *, args: Mapping[str, object] | None = None
) -> Callable[[Sequence[Group]], dict[RolloutId, str]]:
    """A `rollout_sample_filter_path` by slime's: `(args, groups of samples)`, which sets `remove_sample`."""
    known = Arguments.of(args)

    def slime_sample_filter(groups: Sequence[Group]) -> dict[RolloutId, str]:
        samples = [_samples(group, known) for group in groups]
        loaded(function)(known, samples)
        pairs = zip(_verdicts(groups), (sample for group in samples for sample in group), strict=True)
        return {verdict.rollout_id: "removed" for verdict, sample in pairs if sample.remove_sample}

    return slime_sample_filter


def post_process_of(
    function: Function | str, *, args: Mapping[str, object] | None = None
) -> Callable[[Sequence[Group]], dict[RolloutId, float]]:
    """A `custom_reward_post_process_path` by slime's: `(args, samples) -> raw rewards, rewards`.

    The run's estimator gets its rewards, and subtracts baselines of its own.
    """
    known = Arguments.of(args)

    def slime_post_process(groups: Sequence[Group]) -> dict[RolloutId, float]:
        samples = [sample for group in groups for sample in _samples(group, known)]
        returned = loaded(function)(known, samples)
        rewards = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else None
        if not isinstance(rewards, Sequence) or len(rewards) != len(samples):
            raise UserError(
                f"a reward post-processing of slime returns raw rewards and rewards, {len(samples)} each, "
                f"not {repr(returned)[:80]}."
            )
        pairs = zip(_verdicts(groups), rewards, strict=True)
        return {verdict.rollout_id: float(reward) for verdict, reward in pairs}

    return slime_post_process


def _samples(group: Group, known: Arguments) -> list[Sample]:
    episodes = {episode.id: episode for episode in group.episodes}
    return [sample_of(episodes[v.episode_id], v, known.reward_key) for v in group.verdicts]


def _verdicts(groups: Sequence[Group]) -> list[Verdict]:
    return [verdict for group in groups for verdict in group.verdicts]


def _word(reason: str) -> str:
    """A reason as one word: metrics are named by it."""
    return re.sub(r"\W+", "_", reason)
