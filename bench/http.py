"""What the front end adds to a token: server and scheduler under 200 streams, 2,000 tokens a second in all, 2 cores.

    python -m bench.http

A stub stands where the workers are: it gives each answer a word at the pace of a feeder, a process of its own.
Measured is the time from the feeder's step to the client's read, for tokens that come one by one (`spread`), and for
those that come for all answers at once, as a batch makes them (`burst`), each beside bare Starlette in the same run.
The server has one core, clients and feeder the other. Loops are closed: a client asks again when its answer is
complete. Then the pace is raised until a token takes `LATE_MS` or does not come in time, and whose core was full by
then is told.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.http_server import STREAMS, feeder
from bench.report import Bar, report
from server.demo.checkpoints import smollm2
from swapper.store import Store
from worker.add import add_model

RATE = 2000.0
SECONDS = 16.0
TOKENS = 100
TARGETS = {"spread": (2.0, 10.0), "burst": (15.0, 30.0)}  # milliseconds: median, p99
RAMP = (4000, 6000, 8000, 12000, 16000)
RAMP_SECONDS = 8.0
LATE_MS = 100.0
WARM_UP = 1.0  # seconds left out, after the last client has come

Kind = Literal["gswapd", "starlette"]


@dataclass(frozen=True, slots=True)
class Run:
    milliseconds: np.ndarray  # a token: from the feed to the client
    rate: float  # tokens a second that came
    server: float  # share of its core, of the time that it served
    client: float

    def at(self, percent: float) -> float:
        return float(np.percentile(self.milliseconds, percent))

    def as_dict(self) -> dict[str, float]:
        figures = {"p50_ms": self.at(50), "p99_ms": self.at(99), "tokens_per_second": self.rate}
        return {k: round(v, 3) for k, v in (figures | {"server_core": self.server, "client_core": self.client}).items()}


def run(kind: Kind, place: Path, rate: float, burst: bool, seconds: float) -> Run:
    reads, writes = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.http_server", kind, str(place), str(reads)],
        pass_fds=(reads,),
        stdout=subprocess.PIPE,
        stderr=(place / f"{kind}.log").open("w"),
        text=True,
    )
    os.close(reads)
    feeding = multiprocessing.Process(target=_feed, args=(writes, rate, STREAMS if burst else 0), daemon=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().rpartition("//")[2].strip()
        feeding.start()
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "bench.http_client",
            address,
            str(seconds),
            str(TOKENS),
            str(place / "came.json"),
        ]
        subprocess.run(command, check=True, timeout=5 * seconds + 120)
        wall = time.monotonic() - began
    finally:
        os.close(writes)
        if feeding.pid is not None:
            feeding.kill()
            feeding.join()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    told, client = (json.loads((place / f"{name}.json").read_text()) for name in ("fed", "came"))
    began, ended = client["whole"]
    kept = np.array(
        sorted(
            (fed, came)
            for name, times in client["came"].items()
            for fed, came in zip(told["fed"][name], times, strict=True)
            if began + WARM_UP < fed < ended
        )
    )
    pace = float(len(kept) / (kept[-1, 0] - kept[0, 0]))
    return Run(1e3 * (kept[:, 1] - kept[:, 0]), pace, told["cpu"] / wall, client["cpu"] / wall)


def _feed(descriptor: int, rate: float, streams: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    feeder(descriptor, rate, streams)


def saturation(place: Path) -> tuple[str, dict[str, dict[str, float]]]:
    """Raise the pace until it is too much; what was full by then, in a sentence, and each pace's figures."""
    ramp: dict[str, dict[str, float]] = {}
    for rate in RAMP:
        one = run("gswapd", place, rate, False, RAMP_SECONDS)
        ramp[str(rate)] = one.as_dict()
        print(json.dumps({"rate": rate, **ramp[str(rate)]}), flush=True)
        if one.at(50) > LATE_MS or one.rate < 0.95 * rate:
            full = "the server's event loop" if one.server >= one.client else "the clients' core"
            return f"{full}, between {one.rate:.0f} and {rate} tokens a second", ramp
    return f"nothing up to {RAMP[-1]} tokens a second", ramp


def main() -> int:
    bars: list[Bar] = []
    samples: dict[str, list[float]] = {}
    details: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        add_model(Store(place / "store"), smollm2(), "stub")
        for mode, targets in TARGETS.items():
            kinds: tuple[Kind, ...] = ("starlette", "gswapd")
            for kind in kinds:
                one = run(kind, place, RATE, mode == "burst", SECONDS)
                details[f"{mode}, {kind}"] = one.as_dict()
                samples[f"{mode}, {kind}, ms"] = np.percentile(one.milliseconds, range(0, 101, 5)).tolist()
                print(json.dumps({"mode": mode, "kind": kind, **one.as_dict()}), flush=True)
            bars += [Bar(f"a token, {mode}, p{p}", one.at(p), t, "ms") for p, t in zip((50, 99), targets, strict=True)]
        details["saturates first"], details["ramp"] = saturation(place)
        print(f"saturates first: {details['saturates first']}")
    return report("http", bars, samples, details)


if __name__ == "__main__":
    sys.exit(main())
