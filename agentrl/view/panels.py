"""The curves on a run's page, by metric name; metrics that a run has not logged are left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.records import Record

Point: TypeAlias = tuple[float, float | None]
MAX_CURVES = 8
"""The most curves of one chart (count): as many as can be told apart by colour and dashes."""


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


Keys: TypeAlias = Sequence[tuple[str, str]]
"""The label and the name of each metric of a chart."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A kind of chart.

    title: of the chart, or a function from the name of a metric to the title of its chart. keys: of its
    metrics, or a function that finds them among all names of a run.
    """

    title: str | Callable[[str], str]
    unit: str
    keys: Keys | Callable[[Sequence[str]], Keys]
    is_share: bool = False

    def charts_among(self, names: Sequence[str]) -> dict[str, Keys]:
        """The metrics that are among `names`, by the title of their chart."""
        charts: dict[str, list[tuple[str, str]]] = {}
        for label, name in self.keys(names) if callable(self.keys) else self.keys:
            if name in names:
                title = self.title(name) if callable(self.title) else self.title
                charts.setdefault(title, []).append((label, name))
        return {**charts}

    def panel(self, title: str, curves: Sequence[Series]) -> Panel:
        """A chart of curves. Scores above 1 or below 0 are no shares: the axis then shows all of them."""
        values = [value for curve in curves for _, value in curve.points if value is not None]
        is_share = self.is_share and all(0 <= value <= 1 for value in values)
        unit = self.unit if is_share == self.is_share else _SCORES
        return Panel(title, unit, tuple(curves), is_share)


def panels_of(records: Sequence[Record]) -> tuple[Panel, ...]:
    """The charts for which these records hold values, the most informative first.

    Many curves of one kind are distributed over several charts, `MAX_CURVES` in each at most.
    """
    names, panels = _names(records), []
    for plan in _PLANS:
        for title, keys in plan.charts_among(names).items():
            curves = _finite([Series(label, points_of(records, key), key) for label, key in keys])
            panels += [plan.panel(part, some) for part, some in _distributed(title, curves)]
    return tuple(panels)


def overlaid(runs: Mapping[str, Sequence[Record]]) -> tuple[Panel, ...]:
    """The same charts of several runs: one for each curve of `panels_of`, with a curve for each run."""
    names = tuple(dict.fromkeys(name for records in runs.values() for name in _names(records)))
    panels = []
    for plan in _PLANS:
        for title, keys in plan.charts_among(names).items():
            for label, key in keys:
                own_title = title if len(keys) == 1 else f"{title}: {label}"
                curves = _finite([Series(run, points_of(records, key), key) for run, records in runs.items()])
                panels.append(plan.panel(own_title, curves))
    return tuple(panel for panel in panels if panel.series)


def _names(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for record in records for name in record))


def _distributed(title: str, curves: Sequence[Series]) -> Iterator[tuple[str, Sequence[Series]]]:
    """Parts of nearly equal numbers of curves, each with its title."""
    number = math.ceil(len(curves) / MAX_CURVES)
    for part in range(number):
        some = curves[part * len(curves) // number : (part + 1) * len(curves) // number]
        yield (title if number == 1 else f"{title} ({part + 1} of {number})"), some


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


def _by_part(names: Sequence[str]) -> Keys:
    """Scores of the episodes that have a property in common, `eval/greedy/hops=2`; greedy ones first."""
    parts = [name for name in names if _depth(name) > 1 and "=" in name]
    return [(name.partition("=")[2], name) for name in sorted(parts, key=lambda name: _SAMPLED in name)]


def _part_title(name: str) -> str:
    mode, _, by = _eval_label(name.partition("=")[0]).rpartition(", ")
    return f"Held-out success by {by}, {mode}"


def _rewards(names: Sequence[str]) -> Keys:
    """The mean of all agents, and that of each where there are several."""
    total = "rollout/raw_reward"
    agents = [(name.removeprefix(f"{total}/"), name) for name in names if name.startswith(f"{total}/")]
    return [("all agents" if agents else "reward", total), *agents]


def _matching(prefix: str, suffix: str) -> Callable[[Sequence[str]], Keys]:
    """Metrics that begin and end so, labelled with what is in between."""

    def keys(names: Sequence[str]) -> Keys:
        found = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
        return [(name.removeprefix(prefix).removesuffix(suffix), name) for name in found]

    return keys


def _wrong_calls(names: Sequence[str]) -> Keys:
    """Calls that gave the model an error, or a part of the result, by tool and kind."""
    found = [match for name in names if (match := _WRONG_CALL.fullmatch(name))]
    return [(f"{match['tool']}, {match['kind'].replace('/', ': ')}", match[0]) for match in found]


def _eval_label(name: str) -> str:
    return name.removeprefix("eval/").replace("/", ", ")


def _depth(name: str) -> int:
    return name.count("/") if name.startswith("eval/") else 0


_HELD_OUT = "eval/loss"
_MODES = ("/sampled", "/greedy")
_SAMPLED = "/sampled/"
_SCORES = "mean score"
_TOOL = "rollout/tool/"
_WRONG_CALL = re.compile(rf"{_TOOL}(?P<tool>.+?)/(?P<kind>malformed|timeouts|truncated|rejected/.+)/mean")
_PLANS = (
    _Plan("Loss", "nats per token", _supervised),
    _Plan("Success on held-out tasks", "share of episodes", _overall, is_share=True),
    _Plan("Solved in k samples (pass@k)", "share of held-out prompts", _pass_at, is_share=True),
    _Plan(_part_title, "share of episodes", _by_part, is_share=True),
    _Plan("Reward in training", "mean per episode", _rewards),
    _Plan("Reward by part", "mean per episode", _matching("rollout/reward/", "/mean")),
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
    _Plan("Calls of tools", "mean per episode", _matching(_TOOL, "/calls/mean")),
    _Plan("Calls that went wrong", "mean per episode", _wrong_calls),
    _Plan("Latency of tools", "milliseconds per call, mean", _matching(_TOOL, "/latency_ms")),
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
