"""Prometheus metrics in a registry of their own. No label names a job, a run or a path: what is counted stays bounded.

What others count already (allocations by state, calls of Slurm, open watches) is asked for when somebody scrapes, by
`gauge` and `counter`; what happens is told (`verdict`, `detected`, `asked`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MEDIA_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
LAG_PERIOD: Final = 1.0  # seconds between two looks at how late the event loop is
_SECONDS: Final = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LAG: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

Counts = Callable[[], Mapping[str, float]]
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of making beside each counter is of no use here


class _Asked(Collector):
    """A metric with one label, whose values are asked for when somebody looks."""

    def __init__(self, family: Family, name: str, doc: str, label: str, source: Counts) -> None:
        self._family, self._name, self._doc, self._label, self._source = family, name, doc, label, source

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._doc, labels=[self._label])
        for value, count in sorted(self._source().items()):
            family.add_metric([value], count)
        yield family

    def describe(self) -> Iterable[Metric]:
        """The name alone, so that the registry refuses a second one of it."""
        return [self._family(self._name, self._doc)]


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._verdicts = Counter(
            "allocd_verdicts", "Verdicts, by outcome and reason.", ["outcome", "reason"], registry=self.registry
        )
        self._detected = Histogram(
            "allocd_failure_detection_seconds",
            "Time from a rank's end to the decision to stop the others.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._lag = Histogram(
            "allocd_event_loop_lag_seconds",
            "How late the event loop came to a timer, looked at every second.",
            buckets=_LAG,
            registry=self.registry,
        )
        self._requests = Counter(
            "allocd_requests",
            "Requests, by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )

    def gauge(self, name: str, doc: str, label: str, source: Counts) -> None:
        """A metric that goes up and down: its values by the label's value, asked for at each scrape."""
        self.registry.register(_Asked(GaugeMetricFamily, name, doc, label, source))

    def counter(self, name: str, doc: str, label: str, source: Counts) -> None:
        """One that only grows, in the same way (`name` without `_total`)."""
        self.registry.register(_Asked(CounterMetricFamily, name, doc, label, source))

    def verdict(self, outcome: str, reason: str) -> None:
        """A verdict was sealed. Both words are from closed lists."""
        self._verdicts.labels(outcome, reason).inc()

    def detected(self, seconds: float) -> None:
        """So long a first failure went unseen."""
        self._detected.observe(seconds)

    def asked(self, route: str, method: str, status: int) -> None:
        """A request was answered. `route` is a template (`/v1/allocations/{name}`), never a path; a method that is not
        HTTP's own is `other`."""
        self._requests.labels(route, method if method in _METHODS else "other", str(status)).inc()

    async def watch_the_loop(self) -> None:
        """Measure how late the loop is, until cancelled."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(LAG_PERIOD)
            self._lag.observe(max(0.0, time.monotonic() - begin - LAG_PERIOD))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
