"""Policies on the real daemon: three siblings of SmolLM2 on a CPU, of which two fit; and does the simulator foresee it?

    python -m bench.live_policies [--seconds 180]

The siblings share their first layers, and each has the rest for itself; memory holds what is shared, two of the three
rests, and room for keys and values. Requests are one forward pass each (`max_tokens=1`), with gamma arrivals of CV
0.25, the same for every policy, and as frequent, in passes, as in Computron's first setting (1 a second of each model,
where a pass takes 0.057 s). Reads are bounded (`storage.max_bytes_per_second`) so that a whole swap takes seven
times as long as a pass. Policies run one after another, each on a daemon of its own: (a) Computron's and (b) least
recently used are the baselines. Latencies are the client's.

Each run leaves a journal. From it alone the simulator is told what the machine was like, and what it then predicts for
the same requests is held against what the daemon measured.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.policies import EXECUTE
from bench.report import Bar, report
from scheduler.core.core import SchedulerCore
from scheduler.simulate.measured import measure
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import Workload, gamma
from server.demo.checkpoints import sibling, smollm2
from server.demo.daemon import DaemonProcess
from swapper.geometry import GRANULE_BYTES, kv_frames
from swapper.store import Store
from worker.add import add_model

POLICIES = ("computron", "lru", "gswapd")
SHARED_LAYERS, LAYERS = 6, 30
SCALES = (0.99, 0.98, 0.97)
MODELS = tuple(f"sibling{index}" for index in range(len(SCALES)))
SWAP_IN_PASSES = 7.0
CV = 0.25
PROMPT = "The capital of France is the city of"
PAGE = GRANULE_BYTES
KV_TOKENS = 256
WARM_UP = 10.0  # seconds that do not count
ACCURACY = 0.15


def add_siblings(store: Store, scratch: Path) -> tuple[int, int]:
    """Returns the frames to have, and how many pages a swap moves."""
    pages: list[tuple[str, ...]] = []
    for name, scale in zip(MODELS, SCALES, strict=True):
        checkpoint = sibling(smollm2(), scratch / name, range(SHARED_LAYERS, LAYERS), scale)
        image = add_model(store, checkpoint, name)
        pages.append(image.manifest.shards[0].page_hashes(PAGE))
    shared = set(pages[0]).intersection(*pages)
    own = len(pages[0]) - len(shared)
    return len(shared) + 2 * own + kv_frames(KV_TOKENS, image.manifest.kv_bytes_per_token, PAGE) * len(MODELS), own


def daemon(directory: Path, frames: int, **more: Any) -> DaemonProcess:
    config: dict[str, Any] = {
        "store": str(directory / "store"),
        "memory": {"pool": frames * PAGE, "page": PAGE},
        "cluster": {"max_batch_sequences": 8},
        "scheduler": {"max_queue": 1000, "max_queue_total": 1000},
    }
    for section, fields in more.items():
        config[section] = {**config.get(section, {}), **fields}
    return DaemonProcess(directory, config)


def body(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}


def pass_seconds(directory: Path, frames: int) -> float:
    """What one request's forward pass takes on an idle daemon, by the daemon's own word."""
    with daemon(directory, frames) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        times = []
        for _ in range(30):
            answer = client.post("/v1/completions", json=body(MODELS[0])).raise_for_status()
            parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
            times.append(float(parts["compute"]) / 1e3)
    return statistics.median(times[10:])


async def send(url: str, workload: Workload) -> list[float]:
    """Latencies in order of arrival. Requests go out at their times, whatever became of those before."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        began = time.perf_counter() + 0.5

        async def ask(at: float, model: str) -> float:
            await asyncio.sleep(began + at - time.perf_counter())
            sent = time.perf_counter()
            (await client.post("/v1/completions", json=body(model))).raise_for_status()
            return time.perf_counter() - sent

        calls = zip(workload.at.tolist(), workload.which.tolist(), strict=True)
        return await asyncio.gather(*(ask(at, workload.models[which]) for at, which in calls))


def moved(url: str) -> float:
    """Bytes that came from below."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("gswapd_swap_in_bytes_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'source="alias"' not in line)


def live(directory: Path, frames: int, rate: int, policy: str, workload: Workload, journals: Path) -> dict[str, Any]:
    journal = journals / f"{policy}.journal"
    scheduler = {"policy": policy, "journal": str(journal)}
    more = {"scheduler": scheduler, "storage": {"max_bytes_per_second": rate}}
    with daemon(directory, frames, **more) as process:
        latencies = np.array(asyncio.run(send(process.url, workload)))
        nbytes = moved(process.url)
    counted = latencies[workload.at >= WARM_UP]
    return {"latencies": counted.tolist(), "bytes": nbytes, "foreseen": foreseen(journal)}


def foreseen(journal: Path) -> dict[str, tuple[float, float]]:
    """Of the mean and the 99th percentile: what the daemon measured, and what the simulator predicts."""
    was = measure(journal)
    outcome = Simulator(SchedulerCore(was.config), was.groups, was.models).run(was.workload)
    return {
        name: (float(of(was.outcome.latencies)), float(of(outcome.latencies)))
        for name, of in (("mean", np.mean), ("p99", lambda latencies: np.percentile(latencies, 99)))
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--rate", type=float, default=EXECUTE, help="requests of each model in the time of a pass")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--keep", type=Path, help="where journals are kept")
    options = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        frames, own = add_siblings(Store(directory / "store"), directory)
        execution = pass_seconds(directory, frames)
        rate = int(own * PAGE / (SWAP_IN_PASSES * execution))
        print(f"a pass takes {execution * 1e3:.1f} ms; a swap of {own} pages at {rate / 1e6:.0f} MB/s seven times that")
        workload = gamma(dict.fromkeys(MODELS, options.rate / execution), CV, options.seconds + WARM_UP, seed=1)
        for policy in options.policies.split(","):
            runs[policy] = run = live(directory, frames, rate, policy, workload, options.keep or directory)
            mean, p99 = np.mean(run["latencies"]), np.percentile(run["latencies"], 99)
            line = f"{policy:<10} mean {mean:.3f} s, p99 {p99:.3f} s, {run['bytes'] / 1e9:.1f} GB"
            for name, (measured, predicted) in run["foreseen"].items():
                line += f"; {name} by the daemon {measured:.3f} s, foreseen {predicted:.3f} s"
            print(line, flush=True)
    if set(runs) != set(POLICIES):
        return 0
    means = {policy: statistics.fmean(run["latencies"]) for policy, run in runs.items()}
    errors = {
        f"{name}, {policy}": abs(predicted / measured - 1)
        for policy, run in runs.items()
        for name, (measured, predicted) in run["foreseen"].items()
    }
    bars = [
        Bar("live: mean against (a) Computron's policy", means["gswapd"] / means["computron"], 0.6, "ratio"),
        Bar("live: mean against (b) least recently used", means["gswapd"] / means["lru"], 0.75, "ratio"),
        *(Bar(f"the simulator's error: {what}", error, ACCURACY, "share") for what, error in errors.items()),
    ]
    samples = {policy: run["latencies"] for policy, run in runs.items()}
    details = {
        "pass_seconds": execution,
        "max_bytes_per_second": rate,
        "rate": options.rate / execution,
        "seconds": options.seconds,
        "bytes": {policy: run["bytes"] for policy, run in runs.items()},
        "measured and foreseen": {policy: run["foreseen"] for policy, run in runs.items()},
    }
    return report("live_policies", bars, samples, details)


if __name__ == "__main__":
    sys.exit(main())
