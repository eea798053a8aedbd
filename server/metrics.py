"""What a dashboard shows, in Prometheus' words: prefix `gswapd_`, base units, vLLM's names where it has one.

Counters and histograms are fed by the scheduler (as its `Observer`) and by the routes. What is true at the moment of
a scrape (queues, residency, workers) is asked of the scheduler then. Labels are bounded: a model's name becomes
one only if the model is in the store, and goes when the model does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.interface import LoadRecord, ModelStatus, Scheduler, WorkerStatus

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
AGES = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)


class Metrics:
    """All metrics, in a registry of their own. Implements `scheduler.interface.Observer`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Info("gswapd_build", "The version that runs", registry=self.registry).info({"version": version("gswapd")})
        ProcessCollector(registry=self.registry)
        self._outcomes = self._counter("requests", "Requests that ended, by how", "model", "outcome")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", "model")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers", "model")
        self._queue_time = self._histogram("request_queue_time", "From arrival to the first forward pass", FAST)
        self._first_token = self._histogram("time_to_first_token", "From arrival to the first token", FAST)
        self._latency = self._histogram("e2e_request_latency", "From arrival to the end", FAST)
        self._swap_in = self._histogram("swap_in", "Loads, from the first page asked for to the last one in", FAST)
        self._swap_in_failures = self._counter("swap_in_failures", "Loads that failed", "model")
        self._swap_in_bytes = self._counter("swap_in_bytes", "Bytes paged in, by source", "source")
        self._swap_in_stage = self._counter("swap_in_stage_seconds", "Work of page-ins, by stage", "stage")
        self._swap_outs = self._counter("swap_outs", "Page-outs, by reason", "reason")
        self._swapped_pages = self._counter("swap_out_pages", "Pages paged out", "model")
        self._swap_out = self._histogram("swap_out", "Page-outs", FAST)
        self._age = self._histogram("swap_out_idle", "How long a paged-out model had not been used", AGES)
        self._restarts = self._counter("worker_restarts", "Restarts of a group's workers", "group")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"gswapd_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"gswapd_{name}_seconds", text, ("model",), buckets=buckets, registry=self.registry)

    def watch(self, scheduler: Scheduler) -> None:
        """Have scrapes ask this scheduler for what is true at that moment."""
        self.registry.register(_Snapshot(scheduler))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    # ---- told by the routes

    def first_token(self, model: str, seconds: float) -> None:
        self._first_token.labels(model).observe(seconds)

    def answered(self, model: str, prompt_tokens: int, generation_tokens: int) -> None:
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        self._generation_tokens.labels(model).inc(generation_tokens)

    def forget(self, model: str) -> None:
        """The model is gone from the store: its time series end."""
        for metric in (
            self._outcomes,
            self._prompt_tokens,
            self._generation_tokens,
            self._queue_time,
            self._first_token,
            self._latency,
            self._swap_in,
            self._swap_in_failures,
            self._swapped_pages,
            self._swap_out,
            self._age,
        ):
            metric.remove_by_labels({"model": model})

    # ---- told by the scheduler

    def loaded(self, record: LoadRecord) -> None:
        if record.error is None:
            self._swap_in.labels(record.model).observe(record.seconds)
        else:
            self._swap_in_failures.labels(record.model).inc()
        for source, moved in record.sources.items():
            self._swap_in_bytes.labels(source).inc(moved.nbytes)
        for stage, seconds in record.stages.items():
            self._swap_in_stage.labels(stage).inc(seconds)

    def paged_out(self, model: str, pages: int, frames: int, seconds: float, reason: str, age: float) -> None:
        self._swap_outs.labels(reason).inc()
        self._swapped_pages.labels(model).inc(pages)
        self._swap_out.labels(model).observe(seconds)
        self._age.labels(model).observe(age)

    def request_started(self, model: str, waited: float) -> None:
        self._queue_time.labels(model).observe(waited)

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        self._outcomes.labels(model, outcome).inc()
        self._latency.labels(model).observe(seconds)

    def worker_restarted(self, group: str) -> None:
        self._restarts.labels(group).inc()


class _Snapshot(Collector):
    """The scheduler's state at the moment of a scrape."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def describe(self) -> Iterable[Metric]:
        return ()  # else registering would ask a scheduler that has not started

    def collect(self) -> Iterator[Metric]:
        models = self._scheduler.models()
        workers = self._scheduler.workers()
        yield from _of_models(models)
        yield from _of_workers(workers)
        yield from _of_host_tiers(workers)
        yield _frames(models, workers)


def _of_models(models: Iterable[ModelStatus]) -> Iterator[Metric]:
    gauges: dict[str, tuple[str, Callable[[ModelStatus], int]]] = {
        "requests_running": ("Requests that take part in forward passes", lambda m: m.running),
        "requests_waiting": ("Requests that wait for memory or their turn", lambda m: m.waiting),
        "model_resident_pages": ("Pages that are in memory", lambda m: m.resident_pages),
        "model_resident_bytes": ("Bytes that are in memory", lambda m: m.resident_bytes),
        "model_pages": ("Pages in all", lambda m: m.total_pages),
        "model_pinned": ("Whether the model is pinned", lambda m: int(m.pinned)),
    }
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"gswapd_{name}", text, labels=("model",))
        for model in models:
            family.add_metric((model.name,), value(model))
        yield family


def _of_workers(workers: Iterable[WorkerStatus]) -> Iterator[Metric]:
    labels = ("group", "rank")
    up = GaugeMetricFamily("gswapd_worker_up", "Whether the worker is ready", labels=labels)
    memory = GaugeMetricFamily("gswapd_worker_resident_memory_bytes", "Resident memory of its process", labels=labels)
    steps = CounterMetricFamily("gswapd_worker_steps", "Forward passes since its start", labels=labels)
    for worker in workers:
        values = (worker.group, str(worker.rank))
        up.add_metric(values, int(worker.state == "up"))
        if worker.heartbeat is not None:
            memory.add_metric(values, worker.heartbeat.resident_bytes)
            steps.add_metric(values, worker.heartbeat.steps)
    yield from (up, memory, steps)


def _of_host_tiers(workers: Iterable[WorkerStatus]) -> Iterator[Metric]:
    labels = ("group", "rank")
    pages = GaugeMetricFamily("gswapd_host_tier_pages", "Slots of the host tier, by state", labels=(*labels, "state"))
    reads = CounterMetricFamily("gswapd_host_tier_reads", "Pages asked of the host tier", labels=(*labels, "found"))
    for worker in workers:
        if worker.heartbeat is None or (tier := worker.heartbeat.tier) is None:
            continue
        values = (worker.group, str(worker.rank))
        states = {"used": tier.used, "free": tier.ready - tier.used, "preparing": tier.slots - tier.ready}
        for state, count in states.items():
            pages.add_metric((*values, state), count)
        for found, count in {"yes": tier.hits, "no": tier.misses}.items():
            reads.add_metric((*values, found), count)
    yield from (pages, reads)


def _frames(models: Iterable[ModelStatus], workers: Iterable[WorkerStatus]) -> Metric:
    kv: defaultdict[str | None, int] = defaultdict(int)
    for model in models:
        kv[model.group] += model.kv_frames
    frames = GaugeMetricFamily("gswapd_frames", "Frames of memory, by use", labels=("group", "rank", "use"))
    for worker in workers:
        if worker.heartbeat is None:
            continue
        held = worker.heartbeat.frames - worker.heartbeat.frames_free
        granted = min(held, kv[worker.group])
        uses = {"free": worker.heartbeat.frames_free, "kv": granted, "weights": held - granted}
        for use, count in uses.items():
            frames.add_metric((worker.group, str(worker.rank), use), count)
    return frames
