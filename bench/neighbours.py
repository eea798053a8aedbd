"""What neighbours are good for: a model paged in over several GPUs' links, and from another GPU's frames.

    python -m bench.neighbours [--small]

Every GPU has a process of its own, with a pager and no engine. The first one has the model in its host tier and pages
it in and out: alone, with idle neighbours, and with a neighbour that holds it. The limits, plain copies over the same
links, are measured in the same run by the same processes. `--small` runs it on a CPU, with a few pages and no bars.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.loader_model import shard_of, write_model
from bench.neighbour import MODEL, SHARD
from bench.report import Bar, report
from swapper.geometry import GRANULE_BYTES
from swapper.header import encode_header
from swapper.image import Shard, TensorEntry

ROUNDS = 7
PAGE_SIZES = (32 << 20, 64 << 20)
SMALL_PAGES = 40
PACKAGES = ("cuda-bindings",)


class Process:
    """A `bench.neighbour` on one GPU."""

    def __init__(self, name: str, directory: Path, device: str, gpu: int, tier: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.neighbour", name, str(directory), device, str(int(tier))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
        )

    def ask(self, *words: object) -> Any:
        self.tell(*words)
        return self.answer()

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("A process of the bench has died.")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure what neighbours are good for.")
    arguments.add_argument("--small", action="store_true", help="on a CPU, to see that it works")
    arguments.add_argument("--directory", type=Path, default=Path("/dev/shm/gswapd-bench"))
    options = arguments.parse_args()
    gpus = 2 if options.small else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus < 2:
        print("It takes two GPUs; --small takes none.", file=sys.stderr)
        return 2
    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    samples: dict[str, list[float]] = {}
    details: dict[str, Any] = {"gpus": gpus}
    try:
        shard = write(options.directory, options.small)
        for page_bytes in (GRANULE_BYTES,) if options.small else PAGE_SIZES:
            (options.directory / SHARD).write_bytes(pickle.dumps((page_bytes, shard)))
            measurement = Measurement(options.directory, "cpu" if options.small else "cuda", gpus, shard.nbytes)
            measurement.run()
            size = f"{page_bytes >> 20} MiB pages: "
            samples |= {size + name: values for name, values in measurement.samples.items()}
            details |= {size + name: value for name, value in measurement.details.items()}
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
    for name, values in samples.items():
        print(f"{name:55} {statistics.median(values):9.3f}   {min(values):9.3f} to {max(values):.3f}")
    print(json.dumps(details, indent=1))
    if options.small:
        return 0
    return report("neighbours", bars(samples, gpus), samples, details, host=f"h200-x{gpus}", packages=PACKAGES)


class Measurement:
    """Everything with pages of one size."""

    def __init__(self, directory: Path, device: str, gpus: int, nbytes: int) -> None:
        self._directory = directory
        self._device = device
        self._gpus = gpus
        self._nbytes = nbytes
        self._processes: list[Process] = []
        self.samples: dict[str, list[float]] = {}
        self.details: dict[str, Any] = {"bytes": nbytes}

    def run(self) -> None:
        try:
            self._run()
        finally:
            for process in self._processes:
                process.end()

    def _run(self) -> None:
        owner = self._start("owner", 0, tier=True)
        self.details["host tier, s"] = owner.ask("fill")
        for _ in range(ROUNDS):
            self._note("pinned copy, one link, GB/s", owner.ask("pinned") / 1e9)
            self._swap(owner, "alone")
        neighbours = [self._start(f"neighbour-{gpu}", gpu) for gpu in range(1, self._gpus)]
        self.details["neighbours met after, s"] = owner.ask("meet", len(neighbours), 1)
        for turn in range(ROUNDS):
            self._swap(owner, "fan-in", check=turn == 0)
            self._note("pinned copies side by side, GB/s", sum(side_by_side([owner, *neighbours])) / 1e9)
        self.details["neighbour's own page-in"] = neighbours[0].ask("in")
        for turn in range(ROUNDS):
            self._note("NVLink copy, GB/s", owner.ask("across") / 1e9)
            self._swap(owner, "peer source", check=turn == 0)

    def _start(self, name: str, gpu: int, tier: bool = False) -> Process:
        process = Process(name, self._directory, self._device, gpu, tier)
        self._processes.append(process)
        return process

    def _swap(self, owner: Process, name: str, check: bool = False) -> None:
        result = owner.ask("in")
        self.details[f"sources, {name}"] = result["sources"]
        self.details[f"stages, {name}"] = result["stages"]
        if check:
            self.details[f"wrong pages, {name}"] = owner.ask("wrong")
        self._note(f"{name}, s", result["seconds"])
        self._note(f"{name}, GB/s", self._nbytes / result["seconds"] / 1e9)
        self._note("page-out, s", owner.ask("out"))

    def _note(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


def side_by_side(processes: Sequence[Process]) -> list[float]:
    for process in processes:
        process.tell("pinned")
    return [process.answer() for process in processes]


def bars(samples: dict[str, list[float]], gpus: int) -> list[Bar]:
    """Of the larger pages: while a link is busy, a GPU maps one at a time, small or large."""
    size = f"{PAGE_SIZES[-1] >> 20} MiB pages: "
    median = {name.removeprefix(size): statistics.median(its) for name, its in samples.items() if name.startswith(size)}
    ratio = median["alone, s"] / median["fan-in, s"]
    of_limit = median["fan-in, GB/s"] / median["pinned copies side by side, GB/s"]
    return [
        Bar(f"page-in over {gpus} links against one", ratio, 1.7 if gpus == 2 else 3.0, "x", more_is_better=True),
        Bar("page-in from a neighbour's frames", median["peer source, GB/s"], 330.0, "GB/s", more_is_better=True),
        Bar("page-in over all links, of plain copies side by side", of_limit, 0.85, "share", more_is_better=True),
        Bar("page-out of the whole model", median["page-out, s"] * 1e3, 50.0, "ms"),
    ]


def write(directory: Path, small: bool) -> Shard:
    """Write the model's file; returns what a manifest would say of it."""
    path = directory / MODEL
    if small:
        nbytes = SMALL_PAGES * GRANULE_BYTES
        header = encode_header([TensorEntry("data", "U8", (nbytes,), 0, nbytes)])
        path.write_bytes(header + b"".join(random.Random(seed).randbytes(GRANULE_BYTES) for seed in range(SMALL_PAGES)))
    else:
        assert write_model(directory) == path
    return shard_of(path)


if __name__ == "__main__":
    sys.exit(main())
