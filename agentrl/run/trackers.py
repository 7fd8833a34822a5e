"""Where the metrics of a run go, besides metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.config import effective_values
from agentrl.records import Earlier, MetricLog, Tracker, WandbTracker
from agentrl.records.callback import Callback
from agentrl.records.config import ObserveConfig
from agentrl.records.prometheus import PrometheusTracker
from agentrl.view.console import RunConsole


def opened_metrics(
    config: RunConfig, folder: Path, console: RunConsole, callback: Callback | None, earlier: Earlier | None
) -> MetricLog:
    """The metrics of a run, with the trackers of its settings.

    folder: of the run. earlier: see `MetricLog`.
    """
    observe = config.observe
    trackers: dict[str, Callable[[], Tracker]] = {}
    if callback is not None:
        trackers["callback"] = lambda: callback
    if observe.use_wandb:
        settings = effective_values(config)
        trackers["wandb"] = lambda: WandbTracker(folder.resolve(), observe, settings)
    if observe.use_prometheus:
        trackers["prometheus"] = lambda: _prometheus(folder, observe, console)
    return MetricLog(
        folder,
        use_tensorboard=config.run.use_tensorboard,
        trackers=trackers,
        earlier=earlier,
        on_event=lambda sentence: console.line(f"Warning: {sentence}"),
    )


def _prometheus(run_dir: Path, observe: ObserveConfig, console: RunConsole) -> Tracker:
    tracker = PrometheusTracker(run_dir, observe.prometheus_host, observe.prometheus_port)
    console.line(f"Prometheus: http://{observe.prometheus_host}:{tracker.port}/metrics")
    return tracker
