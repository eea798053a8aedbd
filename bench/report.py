"""What every bench does with its figures: print one JSON line a bar, and save them with what they were measured on.

A bar is one figure with a target. Results are saved as `bench/results/<bench>-<host>.json`, where the host is a short
description of the hardware, such as `cpu-2core`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("gswapd", "torch", "triton", "transformers", "ray", "kvikio-cu13")


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what it must reach: at most `target`, or at least, where more is better."""

    name: str
    value: float
    target: float
    unit: str
    more_is_better: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.target if self.more_is_better else self.value <= self.target

    def as_dict(self) -> dict[str, object]:
        return {
            "bar": self.name,
            "value": round(self.value, 4),
            "target": self.target,
            "unit": self.unit,
            "ok": self.ok,
        }


def report(
    bench: str,
    bars: Sequence[Bar],
    samples: Mapping[str, Sequence[float]],
    details: Mapping[str, object] | None = None,
    *,
    host: str | None = None,
    packages: Sequence[str] = (),
    directory: Path = RESULTS,
) -> int:
    """Print and save; returns the exit status, 0 if every bar was reached. `samples` are what the bars came from.

    `host` names hardware whose processor is not what matters; `packages` are those whose versions matter besides ours.
    """
    for bar in bars:
        print(json.dumps(bar.as_dict()), flush=True)
    directory.mkdir(exist_ok=True)
    record = {
        "bench": bench,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(packages),
        "details": dict(details or {}),
        "bars": [bar.as_dict() for bar in bars],
        "medians": {name: statistics.median(values) for name, values in samples.items() if values},
        "samples": {name: [round(value, 6) for value in values] for name, values in samples.items()},
    }
    (directory / f"{bench}-{host or cpu_host()}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(bar.ok for bar in bars) else 1


def cpu_host() -> str:
    """A short description of the hardware, for a file's name: the GPU's own word, or how many cores there are."""
    gpu = _gpu()
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-") if gpu else f"cpu-{_cores()}core"


def hardware() -> dict[str, object]:
    return {
        "processor": _processor(),
        "cores": _cores(),
        **({"gpu": gpu} if (gpu := _gpu()) else {}),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release().split("-")[0],
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute, the bench's own included: was it alone?
    }


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
