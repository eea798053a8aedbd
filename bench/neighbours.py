"""What neighbours are good for: a model paged in over several GPUs' links, and from another GPU's frames.

    python -m bench.neighbours [--small]

Every GPU has a process of its own, with a pager and no engine, and a model in its host tier. The first pages its model
in and out: alone, with idle neighbours, while all page in, and with a neighbour that holds it. The limits, plain copies
over the same links, are measured in the same run by the same processes. `--small` runs it on a CPU, with a few pages
and no bars.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.loader_model import WRITERS, shard_of
from bench.neighbour import SHARDS
from bench.report import Bar, report
from bench.synthetic import BLOCK_STEP, BLOCK_STEPS
from swapper.geometry import GRANULE_BYTES
from swapper.header import encode_header
from swapper.image import Shard, TensorEntry

ROUNDS = 7
MODEL_BYTES = 16 << 30
PAGE_SIZES = (32 << 20, 64 << 20)
SMALL_PAGES = 40
PACKAGES = ("cuda-bindings",)


class Process:
    """A `bench.neighbour` on one GPU."""

    def __init__(self, name: str, directory: Path, device: str, gpu: int, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.neighbour", name, str(directory), device, model],
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
    arguments.add_argument("--page-mib", type=lambda text: int(text) << 20, nargs="+", help="by default 32 and 64")
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
        for page_bytes in (GRANULE_BYTES,) if options.small else options.page_mib or PAGE_SIZES:
            pages = SMALL_PAGES if options.small else MODEL_BYTES // page_bytes
            shards = {
                model_of(gpu): write(options.directory / model_of(gpu), gpu, pages, page_bytes) for gpu in range(gpus)
            }
            (options.directory / SHARDS).write_bytes(pickle.dumps((page_bytes, shards)))
            measurement = Measurement(options.directory, "cpu" if options.small else "cuda", gpus, pages * page_bytes)
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
        owner, *neighbours = self._processes = [
            Process(f"worker-{gpu}", self._directory, self._device, gpu, model_of(gpu)) for gpu in range(self._gpus)
        ]
        self.details["host tiers, s"] = all_at_once(self._processes, "fill")
        self.details["neighbours met after, s"] = owner.ask("meet", len(neighbours), 1)
        owner.ask("help", 0)
        for _ in range(ROUNDS):
            self._note("pinned copy, one link, GB/s", owner.ask("pinned") / 1e9)
            self._swap(owner, "alone")
        owner.ask("help", 1)
        for turn in range(ROUNDS):
            self._note("pinned copies side by side, GB/s", sum(all_at_once(self._processes, "pinned")) / 1e9)
            self._swap(owner, "fan-in", check=turn == 0)
        for _ in range(ROUNDS):
            self._together()
        self.details["neighbour's page-in of the first model"] = neighbours[0].ask("in", model_of(0))
        for turn in range(ROUNDS):
            self._note("NVLink copy, GB/s", owner.ask("across") / 1e9)
            self._swap(owner, "peer source", check=turn == 0)

    def _together(self) -> None:
        """All page their own models in at the same time, as the ranks of a group do."""
        for gpu, process in enumerate(self._processes):
            process.tell("in", model_of(gpu))
        results = [process.answer() for process in self._processes]
        for gpu, process in enumerate(self._processes):
            process.ask("out", model_of(gpu))
        slowest = max(result["seconds"] for result in results)
        self._note("all at once, GB/s", self._gpus * self._nbytes / slowest / 1e9)
        self.details["sources, all at once"] = [result["sources"] for result in results]

    def _swap(self, owner: Process, name: str, check: bool = False) -> None:
        result = owner.ask("in", model_of(0))
        self.details[f"sources, {name}"] = result["sources"]
        self.details[f"stages, {name}"] = result["stages"]
        if check:
            self.details[f"wrong pages, {name}"] = owner.ask("wrong", model_of(0))
        self._note(f"{name}, s", result["seconds"])
        self._note(f"{name}, GB/s", self._nbytes / result["seconds"] / 1e9)
        self._note("page-out, s", owner.ask("out", model_of(0)))

    def _note(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)


def all_at_once(processes: Sequence[Process], *words: object) -> list[Any]:
    for process in processes:
        process.tell(*words)
    return [process.answer() for process in processes]


def bars(samples: dict[str, list[float]], gpus: int) -> list[Bar]:
    """Of the largest pages, which take the fewest mappings."""
    size = max((name.partition(" ")[0] for name in samples), key=int) + " MiB pages: "
    median = {name.removeprefix(size): statistics.median(its) for name, its in samples.items() if name.startswith(size)}
    ratio = median["alone, s"] / median["fan-in, s"]
    limit = median["pinned copies side by side, GB/s"]
    return [
        Bar(f"page-in over {gpus} links against one", ratio, 1.7 if gpus == 2 else 3.0, "x", more_is_better=True),
        Bar("page-in from a neighbour's frames", median["peer source, GB/s"], 330.0, "GB/s", more_is_better=True),
        Bar("fan-in, of plain copies side by side", median["fan-in, GB/s"] / limit, 0.85, "share", more_is_better=True),
        Bar("all at once, of plain copies side by side", median["all at once, GB/s"] / limit, 0.95, "share", True),
        Bar("page-out of the whole model", median["page-out, s"] * 1e3, 50.0, "ms"),
    ]


def model_of(gpu: int) -> str:
    return f"model-{gpu}.safetensors"


def write(path: Path, seed: int, pages: int, page_bytes: int) -> Shard:
    """Write a model whose pages are pieces of one random block, no two the same; returns what its manifest would be."""
    nbytes = pages * page_bytes
    header = encode_header([TensorEntry("data", "U8", (nbytes,), 0, nbytes)])
    path.write_bytes(header)
    os.truncate(path, len(header) + nbytes)
    block = memoryview(random.Random(1).randbytes(page_bytes + BLOCK_STEPS * BLOCK_STEP))
    fd = os.open(path, os.O_WRONLY)

    def put(page: int) -> None:
        start = (seed * pages + page) % BLOCK_STEPS * BLOCK_STEP
        os.pwrite(fd, block[start : start + page_bytes], len(header) + page * page_bytes)

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(put, range(pages)))
    os.close(fd)
    return shard_of(path)


if __name__ == "__main__":
    sys.exit(main())
