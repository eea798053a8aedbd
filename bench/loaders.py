"""How fast a model gets from where its bytes are onto the GPU: the limits, other loaders and gswapd, side by side.

    python -m bench.loaders [--tmpfs DIR] [--disk DIR]

Writes 16 GB of an 8B model's shape to both directories and removes them at the end. Every loader runs in a process of
its own, one after another; what it loaded is compared. Prints a table, and a bar of text for each row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.loader_model import write_model
from bench.loader_peers import PEERS
from bench.report import Bar, report

PACKAGES = ("cuda-bindings", "safetensors", "fastsafetensors", "instanttensor", "runai-model-streamer", "triton")
BAR_CELLS = 40
CHILD_TIMEOUT = 240.0


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure loaders.")
    arguments.add_argument("--tmpfs", type=Path, default=Path("/dev/shm/gswapd-bench"))
    arguments.add_argument("--disk", type=Path, default=Path("/tmp/gswapd-bench"))
    arguments.add_argument("--until", type=float, default=480.0, help="start no loader later than this, in seconds")
    options = arguments.parse_args()
    begun = time.monotonic()
    try:
        tmpfs = write_model(options.tmpfs)
        disk = _cold_copy(tmpfs, options.disk)
        own = _child("bench.loader_own", str(tmpfs), str(disk))
        samples: dict[str, list[float]] = own["seconds"]
        details: dict[str, Any] = own["details"]
        expected = details["checksum of gswapd, page cache"]
        details["prepared_and_own_seconds"] = time.monotonic() - begun
        for name, (_, calls) in PEERS.items():
            if time.monotonic() - begun > options.until:
                details[f"problem of {name}"] = "not measured: the time was up"
                continue
            try:
                child = _child("bench.loader_peers", name, str(tmpfs), str(calls))
            except RuntimeError as error:
                details[f"problem of {name}"] = str(error)
                continue
            samples[name] = child["seconds"]
            details[f"same bytes from {name}"] = child["checksum"] == expected
    finally:
        shutil.rmtree(options.tmpfs, ignore_errors=True)
        shutil.rmtree(options.disk, ignore_errors=True)
    details["same bytes from the host tier"] = details["checksum of gswapd, host tier"] == expected
    _print_table(samples, details)
    return report("loaders", _bars(samples, details), samples, details, host=_gpu(), packages=PACKAGES)


def _cold_copy(path: Path, directory: Path) -> Path:
    """A copy of the file on disk that the page cache does not hold."""
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / path.name
    with path.open("rb") as source, copy.open("wb") as target:
        while os.sendfile(target.fileno(), source.fileno(), None, 1 << 30):
            pass
        os.fsync(target.fileno())
        os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return copy


def _child(module: str, *arguments: str) -> dict[str, Any]:
    """What a fresh process measured. Raises RuntimeError with the end of what it said."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT, check=True)
        found: dict[str, Any] = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took more than {CHILD_TIMEOUT:g} s") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError("\n".join(error.stderr.strip().splitlines()[-12:])) from None
    return found


def steady(samples: dict[str, list[float]], name: str) -> float:
    """The median of all calls but the first."""
    return statistics.median(samples[name][1:])


def _bars(samples: dict[str, list[float]], details: dict[str, Any]) -> list[Bar]:
    def ratio(name: str, value: float, target: float) -> Bar:
        return Bar(name, value, target, "ratio", more_is_better=True)

    pinned, alone = steady(samples, "pinned copy"), steady(samples, "kvikio alone")
    tier, cache = steady(samples, "gswapd, host tier"), steady(samples, "gswapd, page cache")
    moved = details["sibling_sources"]
    bars = [
        ratio("host tier, beside a pinned copy", pinned / tier, 0.96),
        ratio("page cache, beside kvikio alone", alone / cache, 0.90),
        ratio(
            "cold disk, beside the best raw O_DIRECT read",
            min(samples["raw O_DIRECT read"]) / min(samples["gswapd, cold disk"]),
            0.97,
        ),
        Bar("page-out of the model", 1e3 * max(samples["page-out after gswapd, host tier"]), 20.0, "ms"),
        Bar(
            "share of a page-in's time that the link waits for a mapping",
            details["share of the time that the link waited for a mapping"],
            0.01,
            "share",
        ),
        Bar(
            "bytes moved for a sibling that differs in 25 % of its pages",
            1 - moved["alias"] / details["bytes"],
            0.27,
            "share",
        ),
    ]
    if "safetensors load_file" in samples:
        bars.append(ratio("host tier, beside load_file", steady(samples, "safetensors load_file") / tier, 10.0))
    instant = [steady(samples, name) for name in samples if name.startswith("InstantTensor")]
    if instant:
        bars.append(ratio("page cache, beside InstantTensor at its best", min(instant) / cache, 1.25))
    return bars


def _print_table(samples: dict[str, list[float]], details: dict[str, Any]) -> None:
    nbytes = details["bytes"]
    rows = {name: its for name, its in samples.items() if not name.startswith("page-out")}
    moved = dict.fromkeys(rows, nbytes)
    for name in rows:
        if "sibling" in name:
            moved[name] = nbytes - details["sibling_sources"]["alias"]
    best = max(moved[name] / steady(rows, name) for name in rows)
    print("| loader | first call | steady | GB/s | |\n|---|---|---|---|---|")
    for name, seconds in sorted(rows.items(), key=lambda row: steady(rows, row[0])):
        rate = moved[name] / steady(rows, name)
        bar = "█" * round(BAR_CELLS * rate / best)
        print(f"| {name} | {seconds[0]:.3f} s | {steady(rows, name):.3f} s | {rate / 1e9:.1f} | {bar} |")
    for name, problem in details.items():
        if name.startswith("problem of"):
            print(f"{name}: {problem}")


def _gpu() -> str:
    """The GPU's name, for a file's: `h200`."""
    import torch

    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
