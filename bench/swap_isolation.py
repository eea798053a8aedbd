"""Computron's experiment: two models of OPT-13B's shape take turns on GPUs that hold one of them, from the host tier.

    python -m bench.swap_isolation [--store DIR] [--only MESH …] [--layers N] [--small] [--plot FILE.json]

For each mesh (tp, pp) that the GPUs allow, a real daemon serves both models with one group of that mesh, and 24
requests ask for them in turns, one at a time, over HTTP; the first 4 are dropped. Swap-out and swap-in are the
scheduler's own times, execution is that of the same request when the model is in, and respond is what the client sees.
The mesh (1, 1) is measured without and with its neighbours' links (fan-in). Each is compared with (1, 1) of the same
run, and with plain copies from pinned memory over as many links, measured in the same run.

Prints a table, and saves it as CSV with the bars, setting by setting. `--only` takes some of the settings (`1x1`,
`1x1+1`, `2x1`), `--layers` models of fewer layers, where time is short. `--small` is the same on any host with two
small models: to see that it works. `--plot` only draws what a run saved.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.report import RESULTS, Bar, report
from bench.stream_client import StreamClient
from bench.synthetic import OPT_13B, make_mesh_image
from server.demo.daemon import DaemonProcess
from swapper.geometry import pages
from swapper.image import Shard
from swapper.store import Store

REQUESTS, DROPPED = 24, 4
MODELS = ("first", "second")
PROMPT = 8  # tokens
DECODED = 64
PATIENCE = 90.0
STAGES = ("swap-out", "swap-in", "execute", "respond")
COMPUTRON = {
    "1×1": (1.238, 1.350, 0.040, 1.408),
    "2×1": (0.632, 0.732, 0.047, 0.801),
    "1×2": (0.621, 0.858, 0.049, 0.924),
    "2×2": (0.318, 0.423, 0.057, 0.502),
    "4×1": (0.447, 0.689, 0.050, 0.761),
    "1×4": (0.380, 0.645, 0.061, 0.722),
}
"""Its figures in seconds, OPT-13B on A100s with PCIe 4 (arXiv 2306.13835)."""


@dataclass(frozen=True, slots=True)
class Setting:
    tp: int
    pp: int
    helpers: int = 0  # idle neighbours

    @property
    def mesh(self) -> str:
        return f"{self.tp}×{self.pp}"

    @property
    def name(self) -> str:
        return f"{self.mesh} + {self.helpers} idle" if self.helpers else self.mesh

    @property
    def word(self) -> str:
        """Its name on the command line."""
        return f"{self.tp}x{self.pp}" + (f"+{self.helpers}" if self.helpers else "")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Scale:
    config: dict[str, object]
    dtype: str
    page: int
    device: str
    spare: int  # pages of the pool beyond a model's, for keys and values; a model that leaves may keep as many


FULL = Scale(OPT_13B, "bfloat16", 64 << 20, "cuda", 3)
SMALL = Scale(
    {
        **OPT_13B,
        "vocab_size": 1024,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "float32",
    2 << 20,
    "cpu",
    3,
)


@dataclass(slots=True)
class Outcome:
    """What one setting gave. Times are of one swap or request each."""

    setting: Setting
    nbytes: int  # of a model, over all ranks
    seconds: dict[str, list[float]]
    decode: list[float]  # seconds between tokens
    moved: list[int]  # bytes of each swap-in
    sources: dict[str, int]  # bytes of the last swap-in

    def median(self, stage: str) -> float:
        return statistics.median(self.seconds[stage])

    @property
    def rate(self) -> float:
        """Bytes a second of a swap-in, all links together."""
        return statistics.median(moved / took for moved, took in zip(self.moved, self.seconds["swap-in"], strict=True))


def settings_for(gpus: int) -> list[Setting]:
    found = [Setting(1, 1), Setting(1, 1, gpus - 1)]
    meshes = [(2, 1), (1, 2)] + ([(4, 1), (1, 4), (2, 2)] if gpus >= 4 else [])
    return found + [Setting(tp, pp) for tp, pp in meshes]


class Experiment:
    """One setting: a store with both models cut for it, and a daemon."""

    def __init__(self, scale: Scale, setting: Setting, directory: Path, store: Store) -> None:
        self._scale = scale
        self._setting = setting
        self._directory = directory
        self._store = store
        self._random = random.Random(1)

    def run(self) -> Outcome:
        images = [self._store.open(name) for name in MODELS]
        shards = images[0].manifest.shards
        page = self._scale.page
        most = max(pages(shard.nbytes, page) for shard in shards)
        config = {
            "store": str(self._store.root),
            "memory": {"page": page, "pool": (most + self._scale.spare) * page, "host_tier": 2 * most * page},
            "cluster": {"device": self._scale.device, "groups": self._groups(page), "max_batch_sequences": 4},
            "timeouts": {"request": PATIENCE},
        }
        if not self._setting.helpers:
            config["memory"]["peers"] = "off"
        with DaemonProcess(self._directory, config) as daemon:
            try:
                return asyncio.run(self._measure(daemon, shards))
            except BaseException:
                print("\n".join(list(daemon.output)[-40:]), file=sys.stderr)
                raise

    def _groups(self, page: int) -> list[dict[str, Any]]:
        """One that serves, and idle ones that have no room for a model."""
        group = {"name": "serving", "tp": self._setting.tp, "pp": self._setting.pp}
        idle = [{"name": f"idle-{one}", "pool": 2 * page, "host_tier": 0} for one in range(self._setting.helpers)]
        return [group, *idle]

    async def _measure(self, daemon: DaemonProcess, shards: Sequence[Shard]) -> Outcome:
        client = StreamClient(daemon.url, PATIENCE)
        nbytes = sum(shard.nbytes for shard in shards)
        outcome = Outcome(self._setting, nbytes, {stage: [] for stage in STAGES}, [], [], {})
        prompt = [self._random.randrange(3, 1000) for _ in range(PROMPT)]
        async with httpx.AsyncClient(base_url=daemon.url, timeout=PATIENCE) as admin:
            for turn, name in enumerate(MODELS):  # from storage; the host tiers fill behind it
                await client.complete(name, prompt, 1)
                await self._tiers_hold(admin, [(turn + 1) * pages(shard.nbytes, self._scale.page) for shard in shards])
            for turn in range(REQUESTS):
                name = MODELS[turn % 2]
                out_before = await _swap_out_seconds(admin)
                answer = await client.complete(name, prompt, 1)
                again = await client.complete(name, prompt, 1)
                load = await _last_load(admin, name)
                if turn < DROPPED:
                    continue
                outcome.seconds["swap-out"].append(await _swap_out_seconds(admin) - out_before)
                outcome.seconds["swap-in"].append(load["seconds"])
                outcome.seconds["execute"].append(again.first_token_seconds)
                outcome.seconds["respond"].append(answer.first_token_seconds)
                outcome.sources = {source: part["bytes"] for source, part in load["sources"].items()}
                outcome.moved.append(sum(outcome.sources.values()))
            for _ in range(2):
                decoded = await client.complete(name, prompt, DECODED)
            outcome.decode = decoded.intervals()[DECODED // 4 :]
        return outcome

    async def _tiers_hold(self, admin: httpx.AsyncClient, wanted: Sequence[int]) -> None:
        """Until each rank's host tier holds so many pages."""
        began = time.perf_counter()
        while time.perf_counter() - began < PATIENCE:
            workers = (await admin.get("/admin/workers")).raise_for_status().json()["workers"]
            tiers = {its["rank"]: (its["heartbeat"] or {}).get("tier") for its in workers if its["group"] == "serving"}
            if all(tier is not None and tier["used"] >= wanted[rank] for rank, tier in tiers.items()):
                return
            await asyncio.sleep(0.3)
        raise TimeoutError(f"The host tiers did not fill: {tiers}.")


async def _swap_out_seconds(admin: httpx.AsyncClient) -> float:
    """Of all page-outs so far."""
    text = (await admin.get("/metrics")).raise_for_status().text
    return sum(float(found) for found in re.findall(r"^gswapd_swap_out_seconds_sum\{[^}]*\} (\S+)$", text, re.M))


async def _last_load(admin: httpx.AsyncClient, name: str) -> dict[str, Any]:
    models = (await admin.get("/admin/models")).raise_for_status().json()["models"]
    load: dict[str, Any] = next(model["last_load"] for model in models if model["name"] == name)
    return load


def measure(scale: Scale, settings: Sequence[Setting], root: Path) -> Iterator[Outcome]:
    """Every setting, one after another. Those of one mesh share their images, which go when it is done."""
    for mesh in dict.fromkeys((setting.tp, setting.pp) for setting in settings):
        with tempfile.TemporaryDirectory(dir=root) as directory:
            store = Store(Path(directory) / "store")
            began = time.perf_counter()
            for seed, name in enumerate(MODELS):
                make_mesh_image(store, name, scale.config, scale.dtype, *mesh, seed, scale.page)
            print(f"{mesh}: images made in {time.perf_counter() - began:.1f} s", flush=True)
            for setting in settings:
                if (setting.tp, setting.pp) == mesh:
                    began = time.perf_counter()
                    yield Experiment(scale, setting, Path(directory), store).run()
                    print(f"{setting.name}: measured in {time.perf_counter() - began:.1f} s", flush=True)


def print_table(outcomes: Sequence[Outcome]) -> None:
    print(f"{'tp×pp':14}" + "".join(f"{stage:>12}" for stage in STAGES) + f"{'GB/s':>10}{'ms/token':>10}")
    for its in outcomes:
        cells = "".join(f"{its.median(stage):12.4f}" for stage in STAGES)
        step = 1e3 * statistics.median(its.decode)
        print(f"{its.setting.name:14}{cells}{its.rate / 1e9:10.1f}{step:10.2f}", flush=True)


# ---- limits


def limits(gpus: int) -> dict[str, list[float]]:
    """Bytes a second of plain copies from pinned memory to each GPU, all at once: by how many GPUs, one a process."""
    return {str(many): _side_by_side(many) for many in sorted({2, gpus})}


def _side_by_side(gpus: int) -> list[float]:
    copiers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.pinned_copy", str(gpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for gpu in range(gpus)
    ]
    for copier in copiers:
        assert copier.stdout is not None
        copier.stdout.readline()  # it is ready
    for copier in copiers:
        assert copier.stdin is not None
        copier.stdin.write("go\n")
        copier.stdin.flush()
    return [float(copier.communicate(timeout=PATIENCE)[0]) for copier in copiers]


# ---- results


def bars(outcomes: Sequence[Outcome], links: dict[str, list[float]]) -> list[Bar]:
    by_name = {its.setting.name: its for its in outcomes}
    one = outcomes[0]
    found = []
    for its in outcomes:
        gain = one.median("swap-in") / its.median("swap-in")
        ranks = its.setting.ranks
        if its.setting.helpers:
            bar = 1.7 if its.setting.helpers == 1 else 3.0
            found.append(Bar(f"swap-in at 1×1 over {its.setting.helpers + 1} links, against one", gain, bar, "x", True))
        elif ranks > 1:
            found.append(Bar(f"swap-in at {its.setting.mesh} against 1×1", gain, 1.9 if ranks == 2 else 3.7, "x", True))
            share = its.rate / sum(links[str(ranks)])
            bar = 0.95 if ranks == 2 else 0.93
            found.append(Bar(f"rate at {its.setting.mesh}, of pinned copies side by side", share, bar, "share", True))
    slowest = max(its.median("swap-out") for its in outcomes)
    found.append(Bar("swap-out, the slowest mesh", 1e3 * slowest, 50.0, "ms"))
    if "2×1" in by_name:
        ratio = statistics.median(by_name["2×1"].decode) / statistics.median(one.decode)
        found.append(Bar("decode at 2×1 beside 1×1, batch 1", ratio, 1.0, "ratio"))
    return found


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    one = outcomes[0]
    return [
        {
            "tp×pp": its.setting.name,
            **{f"{stage} s": round(its.median(stage), 5) for stage in STAGES},
            "swap-in against 1×1": round(one.median("swap-in") / its.median("swap-in"), 3),
            "GB/s": round(its.rate / 1e9, 2),
            "moved": round(statistics.median(its.moved) / its.nbytes, 4),
            "decode ms/token": round(1e3 * statistics.median(its.decode), 3),
        }
        for its in outcomes
    ]


def save_table(table: Sequence[dict[str, object]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def plot(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Swap-out and swap-in by mesh, beside Computron's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = [row["tp×pp"] for row in table]
    left.bar(names, [row["swap-out s"] for row in table], label="swap-out", color="#b0413e")
    left.bar(names, [row["swap-in s"] for row in table], bottom=[row["swap-out s"] for row in table], label="swap-in")
    left.set(title="gswapd, H200: one swap", ylabel="seconds", xlabel="tp×pp")
    left.legend()
    right.plot(names, [row["swap-in against 1×1"] for row in table], "o-", label="gswapd")
    known = [name for name in names if name in COMPUTRON]
    right.plot(known, [COMPUTRON["1×1"][1] / COMPUTRON[name][1] for name in known], "s--", label="Computron (A100)")
    right.set(title="swap-in, times as fast as 1×1", xlabel="tp×pp")
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Repeat Computron's swap isolation.")
    arguments.add_argument("--store", type=Path, help="where to make stores; by default a temporary directory")
    arguments.add_argument("--only", nargs="+", metavar="MESH", help="some of the settings, (1, 1) first")
    arguments.add_argument("--layers", type=int, help="of the models; by default all 40")
    arguments.add_argument("--small", action="store_true", help="small models on the CPU, as if there were two GPUs")
    arguments.add_argument("--plot", type=Path, help="draw a saved run, next to it")
    options = arguments.parse_args()
    if options.plot is not None:
        plot(json.loads(options.plot.read_text())["details"]["table"], options.plot.with_suffix(".svg"))
        return 0
    gpus = 2 if options.small else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus < 2:
        print("It takes two GPUs; --small takes none.", file=sys.stderr)
        return 2
    links = {} if options.small else limits(gpus)
    outcomes: list[Outcome] = []
    status = 0
    scale = SMALL if options.small else FULL
    if options.layers is not None:
        scale = replace(scale, config={**scale.config, "num_hidden_layers": options.layers})
    settings = [its for its in settings_for(gpus) if options.only is None or its.word in options.only]
    for outcome in measure(scale, settings, options.store or Path(tempfile.gettempdir())):
        outcomes.append(outcome)
        print_table(outcomes)
        if not options.small:
            status = save(scale, outcomes, links, gpus)  # what was measured is kept, also if the next setting fails
    return status


def save(scale: Scale, outcomes: Sequence[Outcome], links: dict[str, list[float]], gpus: int) -> int:
    table = rows(outcomes)
    host = f"h200-x{gpus}"
    save_table(table, RESULTS / f"swap_isolation-{host}.csv")
    samples = {f"{its.setting.name}, {stage}": its.seconds[stage] for its in outcomes for stage in STAGES}
    samples |= {f"{its.setting.name}, decode": its.decode for its in outcomes}
    samples |= {f"pinned copies at once on {many}, bytes/s": rates for many, rates in links.items()}
    details = {
        "table": table,
        "bytes": outcomes[0].nbytes,
        "page_bytes": scale.page,
        "layers": scale.config["num_hidden_layers"],
        "sources": {its.setting.name: its.sources for its in outcomes},
        "Computron's": COMPUTRON,
    }
    return report("swap_isolation", bars(outcomes, links), samples, details, host=host, packages=("cuda-bindings",))


if __name__ == "__main__":
    sys.exit(main())
