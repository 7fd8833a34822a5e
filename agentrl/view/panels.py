"""The curves on a run's page, by metric name; metrics that a run has not logged are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.observe import Record

Point: TypeAlias = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: (step, value) in order of steps; None is a gap. key: of the metric."""

    label: str
    points: tuple[Point, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One small chart. unit: of the vertical axis. is_share: values between 0 and 1."""

    title: str
    unit: str
    series: tuple[Series, ...]
    is_share: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    title: str
    unit: str
    keys: Sequence[tuple[str, str]] | Callable[[Sequence[str]], list[tuple[str, str]]]
    is_share: bool = False

    def keys_among(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The label and the name of each metric of the chart that is among `names`."""
        keys = self.keys(names) if callable(self.keys) else self.keys
        return [(label, key) for label, key in keys if key in names]


def panels_of(records: Sequence[Record]) -> tuple[Panel, ...]:
    """The charts for which these records hold values, the most informative first."""
    names = tuple(dict.fromkeys(name for record in records for name in record))
    panels = []
    for plan in _PLANS:
        curves = [Series(label, points_of(records, key), key) for label, key in plan.keys_among(names)]
        panels.append(Panel(plan.title, plan.unit, _finite(curves), plan.is_share))
    return tuple(panel for panel in panels if panel.series)


def overlaid(runs: Mapping[str, Sequence[Record]]) -> tuple[Panel, ...]:
    """The same charts of several runs: one for each curve of `panels_of`, with a curve for each run."""
    names = tuple(dict.fromkeys(name for records in runs.values() for record in records for name in record))
    panels = []
    for plan in _PLANS:
        keys = plan.keys_among(names)
        for label, key in keys:
            title = plan.title if len(keys) == 1 else f"{plan.title}: {label}"
            curves = [Series(run, points_of(records, key), key) for run, records in runs.items()]
            panels.append(Panel(title, plan.unit, _finite(curves), plan.is_share))
    return tuple(panel for panel in panels if panel.series)


def points_of(records: Sequence[Record], key: str) -> tuple[Point, ...]:
    """One metric by step. Where a step was logged twice, the later value counts."""
    by_step = {record["step"]: record[key] for record in records if key in record}
    return tuple(sorted((step, value) for step, value in by_step.items() if step is not None))


def _finite(curves: Sequence[Series]) -> tuple[Series, ...]:
    """The curves that have a value."""
    return tuple(curve for curve in curves if any(value is not None for _, value in curve.points))


def _overall(names: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (_eval_label(name), name)
        for name in names
        if name != _HELD_OUT and (_depth(name) == 1 or (_depth(name) == 2 and name.endswith(_MODES)))
    ]


def _pass_at(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(_eval_label(name), name) for name in names if _depth(name) and "/pass@" in name]


def _supervised(names: Sequence[str]) -> list[tuple[str, str]]:
    """The losses of SFT; that of RL is no measure of success."""
    return [] if "rollout/raw_reward" in names else [("training", "train/loss"), ("held out", _HELD_OUT)]


def _by_part(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(_eval_label(name), name) for name in names if _depth(name) > 1 and "=" in name]


def _eval_label(name: str) -> str:
    return name.removeprefix("eval/").replace("/", ", ")


def _depth(name: str) -> int:
    return name.count("/") if name.startswith("eval/") else 0


_HELD_OUT = "eval/loss"
_MODES = ("/sampled", "/greedy")
_PLANS = (
    _Plan("Loss", "nats per token", _supervised),
    _Plan("Success on held-out tasks", "share of episodes", _overall, is_share=True),
    _Plan("Solved in k samples (pass@k)", "share of held-out prompts", _pass_at, is_share=True),
    _Plan("Held-out success by kind of task", "share of episodes", _by_part, is_share=True),
    _Plan("Reward in training", "mean per episode", [("reward", "rollout/raw_reward")]),
    _Plan("Response length", "tokens the policy wrote per episode", [("mean", "rollout/response_len/mean")]),
    _Plan("Turns", "mean per episode", [("turns", "rollout/turns/mean")]),
    _Plan("Entropy", "nats per token", [("entropy", "train/entropy_loss")]),
    _Plan("Gradient norm", "before clipping", [("gradient norm", "train/grad_norm")]),
    _Plan(
        "Groups and episodes to mind",
        "share",
        [
            ("groups without signal", "rollout/zero_std/ratio"),
            ("truncated episodes", "rollout/truncated_ratio"),
            ("clipped tokens", "train/pg_clipfrac"),
        ],
        is_share=True,
    ),
    _Plan(
        "Trainer against engine",
        "mean |Δ logprob|",
        [("difference", "train/train_rollout_logprob_abs_diff")],
    ),
    _Plan(
        "Time per stage",
        "seconds per step",
        [
            ("rollout", "perf/rollout_time"),
            ("training", "perf/actor_train_time"),
            ("logprobs", "perf/log_probs_time"),
            ("weights", "perf/update_weights_time"),
        ],
    ),
    _Plan(
        "Throughput",
        "tokens per second",
        [("rollout", "perf/rollout_tok_per_s"), ("training", "perf/actor_train_tok_per_s")],
    ),
)
