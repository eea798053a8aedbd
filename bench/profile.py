"""Profiles: what recording costs, and whether the simulator foresees a live daemon from profiles alone.

    python -m bench.profile [--seconds 90]

Recording: answers of an idle daemon, one with a recording and one without, by turns, pair by pair; and what the look at
`recorder.on` costs a pass, in the process. Foresight: SmolLM2 and a sibling are profiled, then a daemon with memory for
both gets random requests for them (gamma arrivals, CV 1, at about half of what it can do), and the simulator is given
the same requests, what the profiles say of passes and page-ins, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np

from bench.report import Bar, report
from engine.recorder import Recorder
from scheduler.core.core import SchedulerCore
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import Workload, gamma
from server.config import load_config
from server.demo.checkpoints import sibling, smollm2
from server.demo.daemon import DaemonProcess
from server.profile.document import Profile
from server.profile.run import Options, run
from server.simulation import group_specs, priced, simulated_config, stored
from swapper.store import Store
from worker.add import add_model

MODELS = ("smollm2", "sibling")
PROMPT, OUTPUT = 64, 16
VOCABULARY = 49_152
LOAD = 0.5
MEMORY = "1536MiB"
LAYERS = 30
ROUNDS = 24  # with a recording, and as many without


def profiled(store: Store, scratch: Path) -> list[Profile]:
    add_model(store, smollm2(), MODELS[0])
    add_model(store, sibling(smollm2(), scratch / "sibling", range(1, LAYERS), 0.98), MODELS[1])
    options = Options(
        batches=(1, 2, 4, 8),
        prompt_tokens=(PROMPT // 4, PROMPT),
        output_tokens=OUTPUT,
        repeat=3,
        memory=MEMORY,
        store=store.root,
    )
    return run(MODELS, options)


def body(model: str, seed: int, vocabulary: int = VOCABULARY, output: int = OUTPUT) -> dict[str, object]:
    prompt = np.random.default_rng(seed).integers(0, vocabulary, PROMPT).tolist()
    return {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}


async def send(url: str, workload: Workload) -> list[float]:
    """Latencies in order of arrival."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        began = time.perf_counter() + 0.5

        async def ask(number: int, at: float, model: str) -> float:
            await asyncio.sleep(began + at - time.perf_counter())
            sent = time.perf_counter()
            (await client.post("/v1/completions", json=body(model, number))).raise_for_status()
            return time.perf_counter() - sent

        calls = zip(workload.at.tolist(), workload.which.tolist(), strict=True)
        return await asyncio.gather(
            *(ask(number, at, workload.models[which]) for number, (at, which) in enumerate(calls))
        )


def recorded_and_not(
    url: str, group: str, make_body: Callable[[int], dict[str, object]], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of an answer, by the daemon's own word of its computing: with a recording, and without. Pairs follow one
    another, so that what else the machine does slows both."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(2 * rounds + 2):
            on = bool(number % 2)
            if on:
                client.post(f"/admin/groups/{group}/recording").raise_for_status()
            answer = client.post("/v1/completions", json=make_body(number)).raise_for_status()
            if on:
                client.delete(f"/admin/groups/{group}/recording").raise_for_status()
            parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
            times[on].append(float(parts["compute"]) / 1e3)
    return times[True][1:], times[False][1:]


def recording_share(recorded: Sequence[float], plain: Sequence[float]) -> float:
    """What a recording adds, of an answer's time: the median pair."""
    return statistics.median(on / off for on, off in zip(recorded, plain, strict=True)) - 1


def off_seconds() -> float:
    """What a recorder that is off costs a pass: a look a layer, and one at the end."""
    recorder = Recorder()
    looks = 100_000
    return timeit.timeit(lambda: recorder.on, number=looks) / looks * (LAYERS + 3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        store = Store(directory / "store")
        profiles = profiled(store, directory)
        alone = profiles[0].run_seconds()
        assert alone is not None
        workload = gamma(
            dict.fromkeys(MODELS, LOAD / alone / len(MODELS)),
            1.0,
            options.seconds,
            seed=1,
            prompt=PROMPT,
            output=OUTPUT,
        )
        settings = {"store": str(store.root), "memory": {"pool": MEMORY}, "scheduler": {"max_queue": 1000}}
        with DaemonProcess(directory, settings) as daemon:
            recorded, plain = recorded_and_not(daemon.url, "default", lambda seed: body(MODELS[0], seed), ROUNDS)
            latencies = np.array(asyncio.run(send(daemon.url, workload)))
        config = load_config(directory / "gswapd.yaml")
        last = profiles[0].page_ins[-1]
        groups = group_specs(config, 0, int(last.nbytes / last.seconds), 0)
        models = priced(config, stored(config), alone, 0.0, 10.0)
        foreseen = Simulator(SchedulerCore(simulated_config(config, groups, None)), groups, models).run(workload)
    predicted = foreseen.latencies
    step = next(p.decode.median for p in profiles[0].points() if p.batch == 1 and p.decode is not None)
    bars = [
        Bar(
            "mean latency foreseen from profiles, off by",
            abs(float(predicted.mean() / latencies.mean()) - 1),
            0.15,
            "share",
        ),
        Bar("recording, of a pass's time", recording_share(recorded, plain), 0.03, "share"),
        Bar("a recorder that is off, of a pass's time", off_seconds() / step, 0.01, "share"),
    ]
    samples = {"latency": latencies.tolist(), "recorded": recorded, "not recorded": plain}
    details = {
        "rate": LOAD / alone,
        "alone, s": alone,
        "mean, s": float(latencies.mean()),
        "p99, s": float(np.percentile(latencies, 99)),
        "foreseen mean, s": float(predicted.mean()),
        "foreseen p99, s": float(np.percentile(predicted, 99)),
        "costs": [profile.costs() for profile in profiles],
    }
    return report("profile", bars, samples, details)


if __name__ == "__main__":
    sys.exit(main())
