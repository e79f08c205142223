"""``GET /metrics``: what the server has counted, in the Prometheus text format 0.0.4.

Everything is a function of one :class:`Seen`, a look at the engine's own counters, and of three histograms that hear of every
request that has ended. Nothing is counted twice. Every combination of labels is always there, with 0 where nothing happened or
where this server does not do the thing; label values come from fixed sets. A counter that the mapping lacks reads 0.

Names: ``api.md`` section 17 and ``serving.md`` section 16.4. Knows nothing about HTTP, models or the engine's threads.
"""

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, product

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ds4ref.reuse import MISSES

from .banks import REFUSALS, STATES
from .lanes import LANES, REASONS, SURFACES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("completed", "failed", "canceled")
SHEDS = ("queue_full", "slow_reader", "shutdown", "memory")
THINK_MODES = ("none", "low", "high", "max")
KINDS = ("cold", "exact", "partial", "fork")
STORE_ERRORS = ("read", "write", "full", "damaged")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the histograms' buckets."""


@dataclass(frozen=True)
class Seen:
    """One look at a running server.

    counts: ``scheduler.COUNTERS`` by name; uptime: seconds; waiting, running: jobs; banks: ``banks.describe``; body_bytes: of
    the requests in flight; clients: open connections; store, records, disk_bytes, disk_budget: the disk store's ``counts``,
    ``usage`` and budget, empty and 0 where there is none.
    """

    counts: Mapping
    uptime: float = 0.0
    waiting: int = 0
    running: int = 0
    banks: list = field(default_factory=list)
    body_bytes: int = 0
    clients: int = 0
    store: Mapping = field(default_factory=dict)
    records: int = 0
    disk_bytes: int = 0
    disk_budget: int = 0

    def count(self, name):
        return self.counts.get(name, 0)

    def by(self, prefix, names):
        """Counts by the last part of their name."""
        return {name: self.count(f"{prefix}.{name}") for name in names}

    @property
    def inflight(self):
        """Requests that have started and not ended."""
        return self.count("started") - sum(map(self.count, OUTCOMES))

    @property
    def routes(self):
        """(surface, lane) → requests; one that fell back counts in both its lanes."""
        return {key: self.count("route.{}_{}".format(*key)) for key in product(SURFACES, LANES)}

    @property
    def misses(self):
        """Reason → lookups of the disk store that found nothing for it."""
        return {reason: self.store.get(f"miss.{reason}", 0) for reason in MISSES}


class Histogram:
    """Observations by upper bound. ``observe`` and ``read`` may be called from any thread."""

    def __init__(self, bounds=SECONDS):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value):
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def read(self):
        """([(upper bound as text, observations up to it)], sum)."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        names = [*map(repr, self._bounds), "+Inf"]
        return list(zip(names, accumulate(counts), strict=True)), total


class Durations:
    """How long requests took. A request without a first token has no ``ttft``, one whose prompt was not finished no
    ``prefill``."""

    def __init__(self):
        self.ttft, self.prefill, self.request = Histogram(), Histogram(), Histogram()

    def add(self, job):
        """A job has ended."""
        if job.first_token_at is not None:
            self.ttft.observe(job.first_token_at - job.arrived)
        if job.prefilled_at is not None:
            self.prefill.observe(job.prefilled_at - job.admitted_at)
        self.request.observe(job.ended_at - job.arrived)


def families(seen, durations):
    """The metric families, one by one."""
    states = [bank["state"] for bank in seen.banks]
    yield _gauge("uptime_seconds", "Time since the server began to listen.", seen.uptime)
    yield _counter("requests_started", "Requests that the engine has taken.", seen.count("started"))
    yield _counters("requests", "Requests that have ended.", "outcome", {name: seen.count(name) for name in OUTCOMES})
    yield _gauge("requests_inflight", "Requests started and not ended.", seen.inflight)
    yield _counters("route_requests", "Requests by surface and lane; a fallback counts in both lanes.", ("surface", "lane"),
                    seen.routes)  # fmt: skip
    yield _counters("route_decisions", "Why requests were given their lane.", "reason", seen.by("decision", REASONS))
    yield _counters("requests_shed", "Requests refused or given up for a bound.", "reason", seen.by("shed", SHEDS))
    rejected = {key: seen.count("reject.{}.{}".format(*key)) for key in product(LANES, REFUSALS)}
    yield _counters("requests_rejected", "Admissions that a lane refused.", ("lane", "reason"), rejected)
    yield _counters("admits", "Requests by what of their prompt was reused.", "kind", seen.by("admit", KINDS))
    yield _counters("requests_think", "Requests by reasoning effort.", "mode", seen.by("think", THINK_MODES))
    yield _gauge("clients_connected", "Open connections.", seen.clients)
    yield _gauge("queue_depth", "Requests that wait for a bank.", seen.waiting)
    yield _gauge("inflight_body_bytes", "Bytes of the bodies of requests in flight.", seen.body_bytes)
    yield _counters("tokens_prefilled", "Prompt tokens by where their state came from.", "source",
                    {name: seen.count(f"prefill_{name}") for name in ("computed", "cached")})  # fmt: skip
    yield _counter("tokens_decoded", "Tokens sampled.", seen.count("decoded"))
    yield _counters("speculation_tokens", "Draft tokens.", "result", seen.by("spec", ("drafted", "accepted")))
    yield _counter("spec_quench", "Requests whose drafting was paused because it did not pay.", seen.count("spec.quench"))
    yield _gauges("banks", "Resident sequences.", "state", {state: states.count(state) for state in STATES})
    yield _gauge("kv_disk_bytes", "Bytes of the records in the disk store.", seen.disk_bytes)
    yield _gauge("kv_records", "Records in the disk store.", seen.records)
    yield _counter("kv_hits", "Records loaded from the disk store.", seen.store.get("hits", 0))
    yield _counters("kv_misses", "Lookups of the disk store that found nothing, by reason.", "reason", seen.misses)
    yield _counter("kv_evictions", "Records removed to keep the disk budget.", seen.store.get("evictions", 0))
    errors = {kind: seen.store.get(f"error.{kind}", 0) for kind in STORE_ERRORS}
    yield _counters("kv_errors", "Records that could not be read, written or used.", "kind", errors)
    yield _histogram("ttft_seconds", "From arrival to the first token.", durations.ttft)
    yield _histogram("prefill_seconds", "From admission to the end of the prompt.", durations.prefill)
    yield _histogram("request_seconds", "From arrival to the end.", durations.request)


def render(seen, durations):
    """The page, bytes of ``CONTENT_TYPE``."""
    return generate_latest(_Collected(families(seen, durations)))


@dataclass(frozen=True)
class _Collected:
    """What ``generate_latest`` asks for."""

    found: object

    def collect(self):
        return self.found


def _gauge(name, text, value):
    return GaugeMetricFamily(f"ds4_{name}", text, value=value)


def _counter(name, text, value):
    return CounterMetricFamily(f"ds4_{name}", text, value=value)


def _gauges(name, text, labels, values):
    return _labelled(GaugeMetricFamily, name, text, labels, values)


def _counters(name, text, labels, values):
    return _labelled(CounterMetricFamily, name, text, labels, values)


def _labelled(kind, name, text, labels, values):
    """labels: one name or a tuple of them; values: by one label value or a tuple of them."""
    one = isinstance(labels, str)
    family = kind(f"ds4_{name}", text, labels=[labels] if one else labels)
    for key, value in values.items():
        family.add_metric([key] if one else key, value)
    return family


def _histogram(name, text, histogram):
    buckets, total = histogram.read()
    return HistogramMetricFamily(f"ds4_{name}", text, buckets=buckets, sum_value=total)
