"""What is true at the moment of a scrape, asked of the scheduler then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler.interface import ModelState, ModelStatus, Scheduler, WorkerStatus
from server import metric_families as families
from server.metric_families import Family

Sample = tuple[tuple[str, ...], float]

OF_MODELS: dict[Family, Callable[[ModelStatus], float]] = {
    families.RUNNING: lambda m: m.running,
    families.WAITING: lambda m: m.waiting,
    families.OLDEST_WAIT: lambda m: m.oldest_wait,
    families.MODEL_PINNED: lambda m: int(m.pinned),
    families.MODEL_PAGES: lambda m: m.total_pages,
    families.MODEL_RESIDENT_PAGES: lambda m: m.resident_pages,
    families.MODEL_RESIDENT_BYTES: lambda m: m.resident_bytes,
    families.MODEL_KV_FRAMES: lambda m: m.kv_frames,
    families.MODEL_PROFILED: lambda m: m.profiled or 0,
}


def snapshot(scheduler: Scheduler) -> list[Metric]:
    """Call it on the event loop; the result is plain data that any thread may write out."""
    models, workers = scheduler.models(), scheduler.workers()
    states: Sequence[ModelState] = get_args(ModelState)
    samples: dict[Family, list[Sample]] = {
        family: [((m.name,), value(m)) for m in models] for family, value in OF_MODELS.items()
    }
    samples[families.MODEL_STATE] = [((m.name, state), m.state == state) for m in models for state in states]
    samples |= _of_workers(workers)
    samples[families.FRAMES] = list(_frames(models, workers))
    return [_metric(family, values) for family, values in samples.items()]


def _metric(family: Family, samples: Iterable[Sample]) -> Metric:
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(f"gswapd_{family.name}", family.text, labels=tuple(family.labels))
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric


def _of_workers(workers: Iterable[WorkerStatus]) -> dict[Family, list[Sample]]:
    samples: defaultdict[Family, list[Sample]] = defaultdict(list)
    for worker in workers:
        who = worker.group, str(worker.rank)
        samples[families.WORKER_UP].append((who, int(worker.state == "up")))
        samples[families.WORKER_RESTARTS].append((who, worker.restarts))
        path = worker.reader.rpartition("/")[2]
        for one in families.READ_PATHS:
            samples[families.WORKER_READ_PATH].append(((*who, one), int(path == one)))
        if (heartbeat := worker.heartbeat) is None:
            continue
        samples[families.WORKER_MEMORY].append((who, heartbeat.resident_bytes))
        samples[families.WORKER_STEPS].append((who, heartbeat.steps))
        if (tier := heartbeat.tier) is None:
            continue
        slots = {"used": tier.used, "free": tier.ready - tier.used, "preparing": tier.slots - tier.ready}
        samples[families.HOST_TIER_PAGES] += [((*who, state), count) for state, count in slots.items()]
        reads = {"yes": tier.hits, "no": tier.misses}
        samples[families.HOST_TIER_READS] += [((*who, found), count) for found, count in reads.items()]
    return samples


def _frames(models: Iterable[ModelStatus], workers: Iterable[WorkerStatus]) -> Iterator[Sample]:
    kv: defaultdict[str, int] = defaultdict(int)
    for model in models:
        for place in model.places:
            kv[place.group] += place.kv_frames
    for worker in workers:
        if worker.heartbeat is None:
            continue
        held = worker.heartbeat.frames - worker.heartbeat.frames_free
        granted = min(held, kv[worker.group])
        uses = {"weights": held - granted, "kv": granted, "free": worker.heartbeat.frames_free}
        for use, count in uses.items():
            yield (worker.group, str(worker.rank), use), count
