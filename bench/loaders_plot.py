"""Draws what `bench.loaders` measured: rates side by side, and the time line of a page-in from the host tier.

    python -m bench.loaders_plot [RESULTS.json] [OUT.svg]

Needs matplotlib (the extra `bench`). Steady calls are drawn, first ones marked.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.report import RESULTS

OUT = Path("docs/loaders.svg")
OURS, LIMIT, PEER = "tab:blue", "0.6", "tab:orange"
LIMITS = ("pinned copy", "kvikio alone", "raw O_DIRECT read")


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "loaders-h200.json"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else OUT
    record = json.loads(results.read_text())
    mpl.rcParams["svg.hashsalt"] = "loaders"  # the same bytes each time
    figure, (rates, line) = plt.subplots(2, 1, figsize=(9, 8), layout="constrained")
    _draw_rates(rates, record["samples"], record["details"])
    _draw_time_line(line, record["details"].get("time line, host tier, ms"))
    gpu = record["hardware"]["gpu"]
    figure.suptitle(
        f"{record['details']['bytes'] / 1e9:.2f} GB onto one {gpu} ({results.name}, {record['measured'][:10]})"
    )
    figure.savefig(out, metadata={"Date": None})


def _draw_rates(axes: Any, samples: dict[str, list[float]], details: dict[str, Any]) -> None:
    moved = {name: details["bytes"] for name in samples if not name.startswith("page-out")}
    for name in moved:
        if "sibling" in name:
            moved[name] -= details["sibling_sources"]["alias"]
    steady = {name: moved[name] / statistics.median(samples[name][1:]) / 1e9 for name in moved}
    first = {name: moved[name] / samples[name][0] / 1e9 for name in moved}
    names = sorted(steady, key=lambda name: steady[name])
    colours = [OURS if name.startswith("gswapd") else LIMIT if name in LIMITS else PEER for name in names]
    bars = axes.barh(names, [steady[name] for name in names], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.plot([first[name] for name in names], names, "k|", markersize=12, label="first call")
    axes.set_xlabel("GB/s that were moved, steady (grey: limits; blue: gswapd; orange: other loaders)")
    axes.margins(x=0.1)
    axes.legend(loc="lower right")


def _draw_time_line(axes: Any, line: dict[str, list[float]] | None) -> None:
    if line is None:
        axes.axis("off")
        return
    axes.step(line["mapped"], range(1, len(line["mapped"]) + 1), where="post", label="pages mapped", color=LIMIT)
    axes.step(line["there"], range(1, len(line["there"]) + 1), where="post", label="pages there", color=OURS)
    axes.set_xlabel("ms since a page-in from the host tier was asked for")
    axes.set_ylabel("pages of 32 MiB")
    axes.legend()


if __name__ == "__main__":
    main()
