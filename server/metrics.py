"""What a dashboard shows, in Prometheus' words; `server/metric_families.py` lists it.

Counters and histograms are fed by the scheduler (as its `Observer`) and by the routes. Labels are bounded: a model's
name becomes one only if the model is in the store, and goes when the model does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from scheduler.interface import LoadRecord, Scheduler
from server import metric_families as families
from server.gauges import snapshot
from server.metric_families import FED, FINISHES, Family

SOON = 60.0
"""Seconds within which a load after a page-out counts as thrash."""


class Metrics:
    """All metrics, in a registry of their own. Implements `scheduler.interface.Observer`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        Info("gswapd_build", "The version that runs", registry=self.registry).info({"version": version("gswapd")})
        ProcessCollector(registry=self.registry)
        self._clock = clock
        self._fed = {family: self._made(family) for family in FED}
        self._taken: dict[str, float] = {}  # model → when its pages were last taken for another
        self._models: set[str] = set()
        self._next_token: dict[str, Histogram] = {}  # by model: found at once, for every token asks for it
        self._scheduler: Scheduler | None = None
        for family in FED:
            if "model" not in family.labels:
                self._begin(family)

    def _made(self, family: Family) -> Counter | Histogram:
        name, labels = f"gswapd_{family.name}", tuple(family.labels)
        if family.kind == "counter":
            return Counter(name, family.text, labels, registry=self.registry)
        return Histogram(name, family.text, labels, buckets=family.buckets, registry=self.registry)

    def _begin(self, family: Family, **given: str) -> None:
        for labels in family.series(**given):
            self._fed[family].labels(*labels)

    def _count(self, family: Family, *labels: str, by: float = 1) -> None:
        metric = self._fed[family]
        assert isinstance(metric, Counter)
        if self._is_there(family, labels):
            metric.labels(*labels).inc(by)

    def _observe(self, family: Family, seconds: float, *labels: str) -> None:
        metric = self._fed[family]
        assert isinstance(metric, Histogram)
        if self._is_there(family, labels):
            metric.labels(*labels).observe(seconds)

    def _is_there(self, family: Family, labels: Sequence[str]) -> bool:
        """What is heard late of a model that went must not begin its series anew."""
        return "model" not in family.labels or labels[0] in self._models

    def watch(self, scheduler: Scheduler, wait_bound: float) -> None:
        """Have scrapes ask this scheduler for what is true at that moment."""
        self._scheduler = scheduler
        bound = families.WAIT_BOUND
        Gauge(bound.exposed, bound.text, registry=self.registry).set(wait_bound)

    async def exposition(self) -> bytes:
        """What `/metrics` answers. It is long where there are many models, so it is written beside the event loop."""
        now = [] if self._scheduler is None else snapshot(self._scheduler)
        return await asyncio.to_thread(generate_latest, _Scrape(self.registry, now))

    # ---- told by the catalog

    def know(self, model: str) -> None:
        """The model is in the store: its time series begin, at 0."""
        self._models.add(model)
        next_token = self._fed[families.INTER_TOKEN].labels(model)
        assert isinstance(next_token, Histogram)
        self._next_token[model] = next_token
        for family in FED:
            if "model" in family.labels:
                self._begin(family, model=model)

    def forget(self, model: str) -> None:
        """The model is gone from the store: its time series end."""
        self._models.discard(model)
        self._next_token.pop(model, None)
        self._taken.pop(model, None)
        for family, metric in self._fed.items():
            if "model" in family.labels:
                metric.remove_by_labels({"model": model})

    # ---- told by the routes

    def first_token(self, model: str, seconds: float) -> None:
        self._observe(families.FIRST_TOKEN, seconds, model)

    def next_token(self, model: str, seconds: float) -> None:
        if (series := self._next_token.get(model)) is not None:
            series.observe(seconds)

    def answered(self, model: str, prompt_tokens: int, generation_tokens: int) -> None:
        self._count(families.PROMPT_TOKENS, model, by=prompt_tokens)
        self._count(families.GENERATION_TOKENS, model, by=generation_tokens)

    def turned_away(self) -> None:
        """A request that the server had no room for."""
        self._count(families.REQUESTS_REJECTED, "server_full")

    # ---- told by the scheduler

    def loaded(self, record: LoadRecord) -> None:
        if record.error is not None:
            self._count(families.SWAP_IN_FAILURES, record.model)
        else:
            self._observe(families.SWAP_IN, record.seconds, record.model)
            for stage, seconds in record.stages.items():
                self._observe(families.SWAP_IN_STAGE, seconds, record.model, stage)
        for source, moved in record.sources.items():
            self._count(families.SWAP_IN_BYTES, source, by=moved.nbytes)
        taken = self._taken.pop(record.model, None)
        if taken is not None and self._clock() - record.seconds - taken < SOON:
            self._count(families.SWAP_IN_RELOADS, record.model)

    def paged_out(self, model: str, pages: int, frames: int, seconds: float, reason: str, age: float) -> None:
        self._count(families.SWAP_OUTS, reason)
        self._count(families.SWAP_OUT_PAGES, model, by=pages)
        self._observe(families.SWAP_OUT, seconds, model)
        self._observe(families.SWAP_OUT_IDLE, age, model)
        if reason == "memory" and model in self._models:
            self._taken[model] = self._clock()

    def suspended(self, model: str, kept_bytes: int, lost_tokens: int, seconds: float) -> None:
        self._observe(families.SUSPENSION, seconds, model)
        self._count(families.SUSPENSION_KEPT_BYTES, model, by=kept_bytes)
        self._count(families.SUSPENSION_LOST_TOKENS, model, by=lost_tokens)

    def request_started(self, model: str, waited: float, cold: bool) -> None:
        self._observe(families.QUEUE_TIME, waited, model)
        if cold:
            self._observe(families.LOAD_WAIT, waited, model)

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        self._count(families.REQUESTS, model, outcome)
        self._observe(families.LATENCY, seconds, model)
        if outcome not in FINISHES:
            self._count(families.REQUESTS_REJECTED, outcome)

    def worker_restarted(self, group: str) -> None:
        """A scrape shows the worker's own count."""


class _Scrape(Collector):
    """What was counted, and what was true when the scrape began."""

    def __init__(self, registry: CollectorRegistry, now: Sequence[Metric]) -> None:
        self._registry = registry
        self._now = now

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        yield from self._now
