"""AlpaServe's sweep in simulation: what share of requests is answered in time, as load, burstiness and objective grow.

    python -m bench.alpaserve [--seeds 3] [--jobs 2]

Eight GPUs serve eight models of 2.6 billion parameters (5.2 GB, 0.238 s a request, which larger batches do not make
cheaper); a GPU has memory for two and a link of 12 GB/s. Popularity follows a power law of exponent 0.5, arrivals are
gamma processes. From a middle (3 requests a second a model, CV 4, an objective of 6 times the 0.238 s, 200 s), one
thing at a time is varied. Each GPU is a group of its own: a model may have replicas, and none is spread over several
GPUs, as AlpaServe's would be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean

from bench.report import report
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import ModelSpec
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import gamma, power_law

GPUS, FITTING = 8, 2
MODEL_BYTES, LINK = 5_200_000_000, 12e9
PASS = 0.238
PAGES = 16
PAGE_BYTES = MODEL_BYTES // PAGES
POLICIES = ("computron", "lru", "gswapd")


@dataclass(frozen=True)
class Point:
    total_rate: float = 24.0
    cv: float = 4.0
    objective: float = 6.0  # times what a request takes
    models: int = 8
    seconds: float = 200.0


MIDDLE = Point()
SWEEPS = {
    "total_rate": (1.0, 4.0, 8.0, 16.0, 24.0, 32.0),
    "cv": (0.5, 1.0, 2.0, 4.0, 5.0),
    "objective": (3.0, 4.0, 6.0, 10.0, 20.0),
    "models": (1, 2, 4, 8, 12, 16),
}


def points() -> Iterator[tuple[str, Point]]:
    for name, values in SWEEPS.items():
        for value in values:
            yield name, replace(MIDDLE, **{name: value})


def attainment(policy: str, job: tuple[Point, int]) -> float:
    point, seed = job
    objective = point.objective * PASS
    models = [
        SimulatedModel(
            ModelSpec(
                f"m{n}",
                (tuple(range(n * PAGES, (n + 1) * PAGES)),),
                slo=objective,
                page_seconds=PAGE_BYTES / LINK,
                run_seconds=PASS,
            ),
            PASS,
            max_batch=1,
            objective=objective,
        )
        for n in range(point.models)
    ]
    groups = [GroupSpec(f"gpu{n}", FITTING * PAGES, PAGE_BYTES, LINK) for n in range(GPUS)]
    config = CoreConfig(
        PAGE_BYTES,
        max_queue=1 << 30,
        max_queue_total=1 << 30,
        max_running=4,
        extent_pages=1,
        policy=policy,  # type: ignore[arg-type]  # one of POLICIES
    )
    workload = gamma(power_law([m.spec.name for m in models], point.total_rate, 0.5), point.cv, point.seconds, seed)
    outcome = Simulator(SchedulerCore(config), groups, models, timeout=1e6).run(workload)
    return float(outcome.summary()["attainment"])  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    places = list(points())
    jobs = [(point, seed) for _, point in places for seed in range(options.seeds)]
    found: dict[str, list[float]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for policy in POLICIES:
            shares = list(pool.map(partial(attainment, policy), jobs))
            found[policy] = [fmean(shares[n : n + options.seeds]) for n in range(0, len(shares), options.seeds)]
    print(f"{'answered in time':<24}" + "".join(f"{policy:>12}" for policy in POLICIES))
    rows = []
    for index, (name, point) in enumerate(places):
        row = {policy: found[policy][index] for policy in POLICIES}
        rows.append({"varied": name, **asdict(point), **row})
        print(f"{name:<16}{getattr(point, name):>8g}" + "".join(f"{share:12.1%}" for share in row.values()))
    return report("alpaserve", [], {}, {"seeds": options.seeds, "points": rows}, host="simulated")


if __name__ == "__main__":
    sys.exit(main())
