"""From recorded runs to the numbers of a simulation: least squares whose coefficients are not negative.

A turn of T tokens, in which all turns of its engine got N tokens and began prompts of P tokens, took

    request_s + decode_step_s T + decode_request_s N + P / prefill_tok_per_s + standstill_s U

where U updates of the weights fell into it: each gives T steps, and N is the sum of the requests over these.
An update of the trainer took optimizer_step_s + tokens / train_tok_per_s. Both took longer by a share of the
time in which the other side worked, too, where they share processors (play_slowdown, train_slowdown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.assembly.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.types import JSON
from agentrl_simulate.recorded import RecordedInterval, RecordedRun, TrainedBatch, mean_of, replicas_of
from agentrl_simulate.workload import GroupPlan, RecordedWorkload

Floats = npt.NDArray[np.float64]
_SLOWDOWNS: Final = np.arange(0.0, 3.01, 0.05)
_NEVER: Final = 1e12
"""A speed at which tokens cost nothing (tokens/s)."""
_WARM_UP: Final = 2
"""Iterations at the begin of a run that are not measured: processes warm up (count)."""


class Fit(NamedTuple):
    """Coefficients, and the share of the time that they leave unexplained."""

    coefficients: Floats
    slowdown: float
    error: float


def fitted(runs: Sequence[RecordedRun]) -> dict[str, JSON]:
    """The numbers of [simulate] that runs on the same machines tell, by name.

    Raises:
        ConfigError: no run has a timeline with the turns of its last episodes, or none has trained tokens.
    """
    config = runs[0].config
    replicas = replicas_of(config)
    engine = _engine_fit(runs)
    request_s, step_s, each_s, prefill_s, standstill_s = engine.coefficients
    slots = max(config.engine.max_slots // replicas, 1)
    steps = [batch for run in runs for batch in run.batches[_WARM_UP:] or run.batches]
    update = _update_fit(steps)
    num_tokens = sum(batch.tokens for batch in steps)
    score_s = sum(batch.score_s / (1.0 + update.slowdown * batch.overlap) for batch in steps)
    publish_s = mean_of(span.seconds for run in runs for span in run.publishing[_WARM_UP:] or run.publishing)
    model: dict[str, JSON] = {
        **_sizes(config),
        **described([group for run in runs for group in run.groups]),
        "failed_episodes_ratio": _failed_ratio(runs),
        "engine_slots": slots,
        "decode_step_s": float(max(step_s, 1.0 / _NEVER)),
        "decode_request_s": float(each_s),
        "prefill_tok_per_s": float(1.0 / prefill_s) if prefill_s > 1.0 / _NEVER else _NEVER,
        "request_s": float(request_s),
        "standstill_s": float(min(standstill_s, publish_s)),
        "play_slowdown": engine.slowdown,
        "train_tok_per_s": float(1.0 / max(update.coefficients[1], 1.0 / _NEVER)),
        "optimizer_step_s": float(update.coefficients[0]),
        "score_tok_per_s": float(min(num_tokens / max(score_s, 1e-9), _NEVER)),
        "train_slowdown": update.slowdown,
        "publish_s": float(publish_s),
        "between_s": mean_of(batch.between_s for batch in steps if batch.between_s is not None),
        # The time that a player takes for a turn is in the recorded time between two turns.
        "turn_cpu_s": 0.0,
    }
    if config.engine.engine == "embedded":
        model["cached_sessions"] = slots
    return model


def recorded_workload(runs: Sequence[RecordedRun], size: int, seed: int) -> RecordedWorkload:
    """The episodes of the runs. size: of a group (count)."""
    groups = [group for run in runs for group in run.groups]
    return RecordedWorkload(groups, size, seed, _failed_ratio(runs))


def _failed_ratio(runs: Sequence[RecordedRun]) -> float:
    return sum(run.failed for run in runs) / max(sum(run.attempts for run in runs), 1)


def described(groups: Sequence[GroupPlan]) -> dict[str, JSON]:
    """The episodes in the numbers of [simulate]: medians and 0.95 quantiles."""
    episodes = [episode for group in groups for episode in group.episodes if episode.turns]
    turns = [turn for episode in episodes for turn in episode.turns]
    values = {
        "turns": [float(len(episode.turns)) for episode in episodes],
        "turn_len": [float(turn.sampled) for turn in turns],
        "prompt_len": [float(episode.turns[0].world) for episode in episodes],
        "reply_len": [float(turn.world) for episode in episodes for turn in episode.turns[1:]],
        "env_s": [turn.then_s for turn in turns],
    }
    model: dict[str, JSON] = {}
    for name, numbers in values.items():
        least = 0.0 if name == "env_s" else 1.0
        median, p95 = (float(np.quantile(numbers or [least], q)) for q in (0.5, 0.95))
        model[name] = max(median, least)
        # A lognormal time whose median is 0 is 0.
        model[f"{name}_p95"] = max(p95, median, least) if median else least
    model["filtered_ratio"] = mean_of(bool(group.reason) for group in groups)
    model["idle_ratio"] = mean_of(group.is_idle for group in groups)
    return model


def _sizes(config: RunConfig) -> dict[str, JSON]:
    """The sizes of the machines that a run had."""
    engine_gpus = max(config.engine.num_policy_gpus // replicas_of(config), 1)
    trainer_gpus = config.layout.world_size
    return {
        "engine_gpus": engine_gpus,
        "rollout_gpus": engine_gpus * replicas_of(config),
        "trainer_gpus": trainer_gpus,
        "train_gpus": trainer_gpus,
    }


def _engine_fit(runs: Sequence[RecordedRun]) -> Fit:
    parts = [_features(run) for run in runs if run.turns]
    if not parts:
        raise ConfigError(
            "no timeline has turns of the policy, so the engine's speed is unknown; name a run whose folder "
            "has timeline/attempt_1.json.gz and whose last episodes are in it."
        )
    features, overlap, seconds = (np.concatenate(each) for each in zip(*parts, strict=True))
    return _best_fit(features, overlap, seconds)


def _features(run: RecordedRun) -> tuple[Floats, Floats, Floats]:
    """Of each turn: 1, T, N, P, U; the share of it in which the trainer worked; its seconds."""
    replicas = replicas_of(run.config)
    starts = np.array([turn.span.start_s for turn in run.turns])
    ends = np.array([turn.span.end_s for turn in run.turns])
    seconds = np.maximum(ends - starts, 1e-9)
    sampled = np.array([float(turn.sampled) for turn in run.turns])
    tokens = _integral(starts, ends, sampled / seconds)
    prompts = _begun(starts, np.array([float(turn.prefilled) for turn in run.turns]))
    again, updates = np.zeros(len(starts)), np.zeros(len(starts))
    for update in run.publishing:
        inside = (starts < update.end_s) & (update.end_s < ends)
        contexts = [turn.context for turn, is_inside in zip(run.turns, inside, strict=True) if is_inside]
        updates += inside
        again += inside * float(sum(contexts))
    features = np.stack(
        [
            np.ones(len(starts)),
            sampled,
            (tokens(ends) - tokens(starts)) / replicas,
            (prompts(ends) - prompts(starts) + again) / replicas,
            updates,
        ],
        axis=1,
    )
    return features, _overlap(starts, ends, run.training), seconds


class _Course:
    """A piecewise linear function of time: its values at moments, and straight lines between these."""

    def __init__(self, moments: Floats, values: Floats) -> None:
        self._moments, self._values = moments, values

    def __call__(self, at: Floats) -> Floats:
        return np.interp(at, self._moments, self._values)


class _Steps:
    """A function of time that rises in steps: the sum of what began before a moment."""

    def __init__(self, moments: Floats, values: Floats) -> None:
        self._moments, self._values = moments, np.concatenate([[0.0], values])

    def __call__(self, at: Floats) -> Floats:
        return self._values[np.searchsorted(self._moments, at, side="left")]


def _integral(starts: Floats, ends: Floats, rates: Floats) -> _Course:
    """How much was made by a moment, where each interval makes so much a second."""
    moments = np.concatenate([starts, ends])
    order = np.argsort(moments, kind="stable")
    changes = np.concatenate([rates, -rates])[order]
    moments = moments[order]
    made = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(moments))])
    return _Course(moments, made)


def _begun(starts: Floats, amounts: Floats) -> _Steps:
    order = np.argsort(starts, kind="stable")
    return _Steps(starts[order], np.cumsum(amounts[order]))


def _overlap(starts: Floats, ends: Floats, spans: Sequence[RecordedInterval]) -> Floats:
    """The share of each interval in which one of the spans, which do not overlap, went on."""
    if not spans:
        return np.zeros(len(starts))
    begun = np.array([span.start_s for span in spans])
    over = np.array([span.end_s for span in spans])
    worked = _integral(begun, over, np.ones(len(spans)))
    return (worked(ends) - worked(starts)) / np.maximum(ends - starts, 1e-9)


def _update_fit(batches: Sequence[TrainedBatch]) -> Fit:
    trained = [batch for batch in batches if batch.steps and batch.tokens]
    if not trained:
        raise ConfigError("no iteration of the run has trained tokens; name the folder of another run.")
    features = np.array([[batch.steps, batch.tokens] for batch in trained])
    overlap = np.array([batch.overlap for batch in trained])
    return _best_fit(features, overlap, np.array([batch.update_s for batch in trained]))


def _best_fit(features: Floats, overlap: Floats, seconds: Floats) -> Fit:
    """The slowdown and the coefficients with the least error; without any overlap the slowdown is 0."""
    slowdowns = _SLOWDOWNS if np.any(overlap > 0.0) else _SLOWDOWNS[:1]
    fits = []
    for slowdown in slowdowns:
        scaled = features * (1.0 + slowdown * overlap)[:, None]
        coefficients = _non_negative(scaled, seconds)
        error = float(np.abs(scaled @ coefficients - seconds).sum() / seconds.sum())
        fits.append(Fit(coefficients, float(slowdown), error))
    return min(fits, key=lambda fit: fit.error)


def _non_negative(features: Floats, values: Floats) -> Floats:
    """Least squares without a negative coefficient: of all sets of features, the best that has none."""
    number = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    best, least = np.zeros(number), float("inf")
    for mask in range(1, 2**number):
        chosen = [index for index in range(number) if mask >> index & 1]
        part, *_ = np.linalg.lstsq(features[:, chosen] / scale[chosen], values, rcond=None)
        error = float(((features[:, chosen] / scale[chosen]) @ part - values).__pow__(2).sum())
        if np.all(part >= 0.0) and error < least * (1.0 - 1e-9):
            least, best = error, np.zeros(number)
            best[chosen] = part / scale[chosen]
    return best
