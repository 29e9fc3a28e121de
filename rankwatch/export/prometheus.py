"""/metrics: a collector on a registry of its own, built anew from every Status, so that no series outlives what it describes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from time import monotonic

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankwatch.export.samples import Ledger, samples
from rankwatch.model import Status
from rankwatch.shown import clean
from rankwatch.wire.signals import SIGNALS, Signal, exported, level_for

CACHE_S = 1.0
MAX_JOB_LABELS = 10


class StatusCollector(Collector):
    """Families of one Status, in the order of the table. `level`: auto or one of wire.signals.LEVELS."""

    def __init__(self, level: str = "auto") -> None:
        self.level = level
        self.status: Status | None = None
        self.last_render_s = 0.0
        self._ledger = Ledger()

    def describe(self) -> Iterable[Metric]:
        """Nothing: without this the registry would collect once at registration, before there is a Status."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Every family that has a sample at the level in force."""
        status = self.status
        if status is None:
            return
        names = exported(level_for(self.level, status.job.world_size))
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, labels, value in samples(status, self._ledger, self.last_render_s):
            if name in names:
                found.setdefault(name, []).append((labels, float(value)))
        for signal in SIGNALS:
            if signal.name in found:
                yield _family(signal, found[signal.name], status)


def _family(signal: Signal, values: list[tuple[tuple[str, ...], float]], status: Status) -> Metric:
    extra = _job_labels(status) if signal.name == "rankwatch_job_info" else {}
    labels = ("job_id", *signal.labels, *extra)
    family: CounterMetricFamily | GaugeMetricFamily
    if signal.type == "counter":
        # created=None: no _created series, whatever the process-wide switch says
        family = CounterMetricFamily(signal.name, signal.help, labels=labels)
    else:
        family = GaugeMetricFamily(signal.name, signal.help, labels=labels)
    for found, value in values:
        family.add_metric([clean(text) for text in (status.job.job_id, *found, *extra.values())], value)
    return family


def _job_labels(status: Status) -> dict[str, str]:
    named = {f"label_{re.sub('[^a-zA-Z0-9_]', '_', key)}": str(value)[:100] for key, value in sorted(status.job.labels.items())}
    return dict(list(named.items())[:MAX_JOB_LABELS])


class Exporter:
    """Renders a Status for a scraper. Safe to call from several threads; several scrapers within a second cost one rendering.

    level: auto (by world size), low, default or full; ValueError for another word.
    """

    def __init__(self, level: str = "auto", clock: Callable[[], float] = monotonic) -> None:
        level_for(level, 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._collector = StatusCollector(level)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        self._cache: dict[str, tuple[float, object, bytes]] = {}

    def render(self, status: Status, accept: str = "") -> tuple[bytes, str]:
        """(body, content type), OpenMetrics where `accept` asks for it, else the text format."""
        encode, content_type = choose_encoder(accept)
        judged = (status.state, tuple((incident.id, incident.verdict.verdict) for incident in status.open_incidents))
        with self._lock:
            begin = self._clock()
            at, what, body = self._cache.get(content_type, (0.0, None, b""))
            if what == judged and begin - at < CACHE_S:
                return body, content_type
            self._collector.status = status
            body = encode(self._registry)
            self._collector.last_render_s = self._clock() - begin
            if len(self._cache) > 8:  # the content type carries words of the client's header
                self._cache.clear()
            self._cache[content_type] = (begin, judged, body)
            return body, content_type
