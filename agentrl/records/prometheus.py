"""The metrics of a run for Prometheus, which reads them over HTTP whenever it wants to.

Each metric of the last step is a gauge: `rollout/raw_reward` is agentrl_rollout_raw_reward{run="NAME"}. What
the run does at the moment (`RunStatus`) is read from status.json at each request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from agentrl.errors import ConfigError
from agentrl.records.status import RunStatus, read_status

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily

_PREFIX = "agentrl_"


class PrometheusTracker:
    """Serves the page /metrics until it is closed, in threads of its own.

    run_dir: the run's folder; its name is the label `run`. port: 0 = a free one.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(self, run_dir: Path, host: str, port: int) -> None:
        # Imported late: most runs do without.
        from prometheus_client import CollectorRegistry, start_http_server

        self._run_dir = run_dir
        self._numbers: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server: WSGIServer
        self._thread: Thread
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Show the metrics of one step, beside those of earlier ones that it has not."""
        numbers = {**self._numbers, **metrics, "step": float(step), "time_seconds": time_s}
        # Replaced as a whole: a request reads it in another thread.
        self._numbers = {name: float(value) for name, value in numbers.items()}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges; the server calls it for every request."""
        named: dict[str, tuple[str, float]] = {}
        for name, value in self._numbers.items():
            named[_name(name)] = f"{name} of the last step that had it", value
        for name, (what, value) in named.items():
            yield self._gauge(name, what, {"": value})
        try:
            status = read_status(self._run_dir)
        except ConfigError:
            # None is written yet.
            return
        yield from self._now(status)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _now(self, status: RunStatus) -> Iterator[GaugeMetricFamily]:
        """What the run does at the moment."""
        if (places := status.places) is not None:
            names = ("in_flight", "waiting", "in_training")
            groups = {name: float(getattr(places, name)) for name in names}
            yield self._gauge("now_groups", "groups that have a place", groups, "place")
        shares = {side: float(getattr(status.utilisation, side)) for side in ("engine", "trainer")}
        yield self._gauge("now_utilisation", "share of the time that it works", shares, "side")
        yield self._gauge("now_episodes", "episodes in play, by their stage", status.episodes, "stage")
        yield self._gauge("now_requests", "requests at the engine", {"": status.requests})
        versions = {
            name: float(process.version)
            for name, process in status.processes.items()
            if process.version is not None
        }
        yield self._gauge("now_versions", "version of the weights that a server has", versions, "process")
        yield self._gauge("now_idle_seconds", "time since something began or ended", {"": status.idle_s})

    def _gauge(
        self, name: str, what: str, values: Mapping[str, float], label: str | None = None
    ) -> GaugeMetricFamily:
        """A gauge with a value for each value of the label, or with one."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        labels = ["run"] if label is None else ["run", label]
        gauge = GaugeMetricFamily(_PREFIX + name, what, labels=labels)
        for key, value in values.items():
            gauge.add_metric([self._run_dir.name, key][: len(labels)], value)
        return gauge


def _name(metric: str) -> str:
    """The name of a metric in the form that Prometheus takes."""
    return re.sub(r"[^a-zA-Z0-9_]+", "_", metric).strip("_")
