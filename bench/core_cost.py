"""What a decision costs: the core's time an event, by the number of groups and models, and a million requests.

    python -m bench.core_cost

Both builds are measured, one after the other: first the scheduler compiled (`setup.py`; made anew, which takes a
minute), on which the bars are, then the sources as they are, which are told beside it.

There are five models a group, of which two fit. Two loads: one whose popularity is skewed, so that most requests find
their model in memory, though a load's 17 extents, each a PagedIn and a PagedOut with a decision of its own, still make
most of the events, about ten a request; and one that thrashes, where all models are asked for alike and every link is
busy all the time. Bars are on the first; the second is told beside it. A simulation first runs warm, so start-up does
not count. Only `SchedulerCore.step` is timed, except for the million, which is the simulator's time as a whole. Times
are the process's own (of a step, the time that passed, times the share that the process had of a processor meanwhile),
so that neighbours on the machine count as little as can be. The compiled build's figures are also drawn:
`bench/results/core_cost.svg`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import compiled
from bench.policies import EXECUTE, PAGE_BYTES, PAGES, SWAP_IN
from bench.report import RESULTS, Bar, report
from scheduler.core import actions, events
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import ModelSpec
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import gamma, power_law

MODELS_A_GROUP = 5
FITTING = 2
LOADS = {"skewed": (10.0, 1.0), "thrashing": (3.0, 0.0)}  # requests a second and group; exponent of popularity
GROWING_GROUPS = (1, 10, 100, 1000)  # with five models each
GROWING_MODELS = (50, 500, 5000)  # on ten groups
LARGEST = (1000, 5000)
MILLION = (20, 100)  # groups and models of the million requests


@dataclass
class TimedCore:
    core: SchedulerCore
    seconds: float = 0.0
    events: int = 0

    def step(self, event: events.Event) -> Sequence[actions.Action]:
        began = time.perf_counter()
        taken = self.core.step(event)
        self.seconds += time.perf_counter() - began
        self.events += 1
        return taken


def simulator(groups: int, models: int, load: str = "skewed") -> tuple[Simulator, TimedCore, Mapping[str, float]]:
    """And the rate of each model. However many models there are, groups have as much to do."""
    core = TimedCore(
        SchedulerCore(
            CoreConfig(PAGE_BYTES, max_queue=1 << 30, max_queue_total=1 << 30, max_running=32, extent_pages=1)
        )
    )
    specs = [GroupSpec(f"g{n}", FITTING * PAGES, PAGE_BYTES, PAGE_BYTES * PAGES / SWAP_IN) for n in range(groups)]
    known = [
        SimulatedModel(
            ModelSpec(
                f"m{n}",
                (tuple(range(n * PAGES, (n + 1) * PAGES)),),
                page_seconds=SWAP_IN / PAGES,
                run_seconds=EXECUTE,
            ),
            EXECUTE,
        )
        for n in range(models)
    ]
    rate, exponent = LOADS[load]
    rates = power_law([model.spec.name for model in known], rate * groups, exponent)
    return Simulator(core, specs, known, timeout=1e6), core, rates


def event_cost(groups: int, models: int, requests: int, load: str = "skewed") -> float:
    """Microseconds of the core an event, once it has run warm."""
    simulated, core, rates = simulator(groups, models, load)
    seconds = requests / sum(rates.values())
    simulated.run(gamma(rates, 1.0, seconds / 4, seed=1))
    core.seconds, core.events = 0.0, 0
    gc.collect()
    gc.freeze()  # thousands of models are there to stay; how long it takes to look through them is not the core's cost
    wall, processor = time.perf_counter(), time.process_time()
    began = simulated.now
    workload = gamma(rates, 1.0, seconds, seed=2)
    workload.at[:] += began
    simulated.run(workload)
    share = (time.process_time() - processor) / (time.perf_counter() - wall)
    cost = 1e6 * core.seconds / core.events * min(1.0, share)
    print(f"{groups:5} groups, {models:5} models, {load}: {cost:7.1f} µs an event, {core.events:,} events", flush=True)
    return cost


def many_requests(count: int) -> float:
    """Seconds that it takes to simulate a million, from so many."""
    groups, models = MILLION
    simulated, _, rates = simulator(groups, models)
    workload = gamma(rates, 1.0, count / sum(rates.values()), seed=3)
    gc.collect()
    gc.freeze()
    began = time.process_time()
    simulated.run(workload)
    took = (time.process_time() - began) * 1e6 / len(workload)
    print(f"a million requests: {took:.0f} s (from {len(workload):,})", flush=True)
    return took


def drawing(curves: Mapping[str, Mapping[int, float]]) -> str:
    """Cost over size, which runs on a logarithmic scale: what grows with the logarithm is a straight line."""
    width, height, margin = 640, 360, 50
    top = 1.15 * max(cost for curve in curves.values() for cost in curve.values())
    most = math.log10(max(size for curve in curves.values() for size in curve))

    def place(size: float, cost: float) -> str:
        x = margin + (width - 2 * margin) * math.log10(size) / most
        return f"{x:.1f},{height - margin - (height - 2 * margin) * cost / top:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for tick in range(5):
        cost = top * tick / 4
        left, right = place(1, cost), place(10**most, cost)
        parts.append(f'<polyline points="{left} {right}" stroke="#ddd" fill="none"/>')
        x, y = left.split(",")
        parts.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" font-size="11" text-anchor="end">{cost:.0f}</text>')
    for exponent in range(math.floor(most) + 1):
        x, y = place(10**exponent, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18}" font-size="11" text-anchor="middle">{10**exponent}</text>')
    for (name, curve), colour in zip(curves.items(), ("#4477aa", "#ee6677"), strict=True):
        points = " ".join(place(size, cost) for size, cost in curve.items())
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2" fill="none"/>')
        x, y = points.split(" ")[-1].split(",")
        parts.append(f'<text x="{x}" y="{float(y) - 8}" font-size="12" fill="{colour}" text-anchor="end">{name}</text>')
    parts.append(f'<text x="{margin}" y="24" font-size="14">microseconds of the core an event</text></svg>')
    return "\n".join(parts) + "\n"


@dataclass
class Figures:
    """Of one build. Microseconds an event, by size, and seconds for a million requests."""

    groups: dict[int, float]
    models: dict[int, float]
    thrashing: float
    million: float

    def details(self) -> dict[str, object]:
        return {"by groups, us": self.groups, "by models, us": self.models, "thrashing, us": self.thrashing}


def measure(requests: int, million: int) -> Figures:
    """Of the build that runs this."""
    return Figures(
        {n: event_cost(n, n * MODELS_A_GROUP, requests) for n in GROWING_GROUPS},
        {n: event_cost(10, n, requests) for n in GROWING_MODELS},
        event_cost(*LARGEST, requests // 4, "thrashing"),
        many_requests(million),
    )


def measured(build: Path | None, requests: int, million: int) -> Figures:
    """Of a compiled build, or of the sources, in a process of its own."""
    print(f"--- {'compiled' if build else 'sources'}", flush=True)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "figures"
        command = [sys.executable, "-P", "-m", "bench.core_cost", "--figures", str(file)]
        command += ["--requests", str(requests), "--million", str(million)]
        subprocess.run(command, env=compiled.environment(build), check=True)
        found = json.loads(file.read_text())
    by_size = {name: {int(size): cost for size, cost in found.pop(name).items()} for name in ("groups", "models")}
    return Figures(**by_size, **found)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=30_000, help="of each size")
    parser.add_argument("--million", type=int, default=1_000_000, help="requests of the compiled build's long run")
    parser.add_argument("--plain-million", type=int, default=100_000, help="and of the sources'")
    parser.add_argument(
        "--figures", type=Path, help="measure the build that runs this only, and leave its figures here"
    )
    options = parser.parse_args()
    if options.figures:
        figures = measure(options.requests, options.million)
        options.figures.write_text(json.dumps(asdict(figures)))
        return 0
    with TemporaryDirectory() as directory:
        compiled.build(Path(directory))
        fast = measured(Path(directory), options.requests, options.million)
    plain = measured(None, options.requests, options.plain_million)
    RESULTS.mkdir(exist_ok=True)
    curves = {"groups, five models each": fast.groups, "models, ten groups": fast.models}
    (RESULTS / "core_cost.svg").write_text(drawing(curves))
    bars = [
        Bar(f"core, an event, {LARGEST[0]} groups and {LARGEST[1]} models", fast.groups[LARGEST[0]], 12.0, "us"),
        Bar("a million requests simulated", fast.million, 90.0, "s"),
        Bar(
            "growth from 10 to 1000 groups", fast.groups[1000] / fast.groups[10], math.log(1000) / math.log(10), "ratio"
        ),
        Bar(
            "growth from 50 to 5000 models", fast.models[5000] / fast.models[50], math.log(5000) / math.log(50), "ratio"
        ),
    ]
    details = {
        "build": "compiled",
        **fast.details(),
        "plain Python": {**plain.details(), "a million, s": plain.million},
    }
    return report("core_cost", bars, {}, details)


if __name__ == "__main__":
    sys.exit(main())
