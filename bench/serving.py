"""The whole daemon with models that take turns: first tokens, decodes, neighbours and siblings, over HTTP.

    python -m bench.serving [--store DIR] [--small]

Three models of Llama 8B's shape in bfloat16, of random weights, are written into a store (a tmpfs, if DIR is one): `a`,
`b`, and `a2`, which differs from `a` in every fourth page. A real daemon serves them, with one GPU, a host tier that
holds all their pages, and room for `a` and `b` at once. Every time is what a client sees. `--small` is the same on any
host, in a minute, with models of 30 MB: to see that it works, not to measure.

The limit of a page-in is the rate of a copy from pinned memory, measured before the daemon starts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
import uvloop

from bench.report import Bar, report
from bench.stream_client import Answer, StreamClient
from bench.synthetic import LLAMA_8B, SMALL_LLAMA, make_image
from server.demo.daemon import DaemonProcess
from swapper.image import Image
from swapper.store import Store

PATIENCE = 120.0
A, B, SIBLING = "a", "b", "a2"
DIFFERING = 4  # one page in so many
ALLOWED_SHARE = 0.27
PROPORTION = 1.15  # a sibling's time beside a whole model's may be so many times its share of the bytes
PROMPT, FEW = 128, 4  # tokens in and out, to time a first token
COLD_STARTS, SIBLING_SWAPS = 9, 7
WARM = 8  # tokens of each stream before steps are counted


@dataclass(frozen=True, slots=True)
class Scale:
    """What is measured on which models."""

    config: dict[str, object]
    dtype: str
    page: int
    memory: dict[str, object]
    context: int = 1024
    decodes: int = 96  # tokens, with a batch of 1
    batch: int = 32
    batch_decodes: int = 192  # tokens of each sequence
    neighbour_tokens: int = 1500
    swaps: int = 100


FULL = Scale(LLAMA_8B, "bfloat16", 32 << 20, {"pool": "44GiB", "page": "32MiB", "host_tier": "36GiB"})
SMALL = Scale(
    SMALL_LLAMA,
    "float32",
    2 << 20,
    {"pool": "160MiB", "page": "2MiB", "host_tier": "96MiB"},
    context=128,
    decodes=24,
    batch=4,
    batch_decodes=40,
    neighbour_tokens=400,
    swaps=10,
)


class Serving:
    """One daemon under measurement."""

    def __init__(self, scale: Scale, daemon: DaemonProcess, images: dict[str, Image]) -> None:
        self._scale = scale
        self._daemon = daemon
        self._client = StreamClient(daemon.url)
        self._admin = httpx.Client(base_url=daemon.url, timeout=PATIENCE)
        self._random = random.Random(1)
        self._prompts = {name: self._prompt(PROMPT) for name in images}
        self.bytes = images[A].manifest.shards[0].nbytes
        self.pages = {name: image.manifest.shards[0].page_count(scale.page) for name, image in images.items()}
        self.samples: dict[str, list[float]] = {}
        self.details: dict[str, Any] = {"bytes": self.bytes, "pages": self.pages[A]}

    async def measure(self) -> None:
        self._wait_for_tier("ready")
        await self._first_requests()
        await self._cold_starts()
        await self._decodes()
        await self._neighbour()
        await self._sibling()
        await self._swaps()

    async def _first_requests(self) -> None:
        """Each model once, from storage; the host tier fills behind it."""
        wanted = 0
        for name, distinct in ((A, 1.0), (B, 1.0), (SIBLING, 1 / DIFFERING)):
            answer = await self._ask(name)
            self._note(f"first request ever, {name}", answer.first_token_seconds)
            self._load_details(f"first load, {name}", name)
            wanted += int(self.pages[name] * distinct)
            self._wait_for_tier("used", wanted)
            self._evict(name)

    async def _cold_starts(self) -> None:
        for _ in range(COLD_STARTS):
            answer = await self._ask(A)
            self._note("first token, cold in the host tier", answer.first_token_seconds)
            self._note("page-in from the host tier", self._load_details("load from the host tier", A)["seconds"])
            began = time.perf_counter()
            self._evict(A)
            self._note("evict", time.perf_counter() - began)
        await self._ask(A)
        for _ in range(COLD_STARTS):
            self._note("first token, resident", (await self._ask(A)).first_token_seconds)

    async def _decodes(self) -> None:
        scale = self._scale
        prompts = [self._prompt(scale.context - scale.decodes) for _ in range(2)]
        for prompt in prompts:
            alone = await self._client.complete(A, prompt, scale.decodes)
        self._note("step, batch 1", *alone.intervals()[WARM:])
        for _ in range(2):  # graphs are recorded meanwhile
            prompts = [self._prompt(scale.context - scale.batch_decodes // 2) for _ in range(scale.batch)]
            answers = await asyncio.gather(*(self._client.complete(A, p, scale.batch_decodes) for p in prompts))
        begin, end = max(one.times[WARM] for one in answers), min(one.times[-1] for one in answers)
        counts = [sum(begin < when <= end for when in one.times) for one in answers]
        self._note("interval, batch of many", *(its for one in answers for its in one.intervals()))
        self._note("step, batch of many", *((end - begin) / count for count in counts))
        self.details["tokens counted, batch of many"] = sum(counts)

    async def _neighbour(self) -> None:
        """One stream of `a`: undisturbed, and while `b` comes in, again and again."""
        scale = self._scale
        undisturbed = await self._client.complete(A, self._prompt(PROMPT), scale.neighbour_tokens)
        self._note("interval, undisturbed", *undisturbed.intervals()[WARM:])
        spans: list[tuple[float, float]] = []
        started = asyncio.Event()
        stream = asyncio.create_task(
            self._client.complete(A, self._prompt(PROMPT), scale.neighbour_tokens, lambda answer: started.set())
        )
        await started.wait()
        while not stream.done():
            answer = await self._ask(B)
            spans.append((answer.sent, answer.times[0]))
            await asyncio.to_thread(self._evict, B)
        times = (await stream).times
        between = [
            later - earlier
            for earlier, later in pairwise(times)
            if any(earlier < end and later > begin for begin, end in spans)
        ]
        self._note("interval, while a neighbour comes in", *between)
        self._note("first token, cold, beside a decoding neighbour", *(end - begin for begin, end in spans))

    async def _sibling(self) -> None:
        """`a` stays, `a2` comes and goes."""
        moved = 0
        for _ in range(SIBLING_SWAPS):
            answer = await self._ask(SIBLING)
            self._note("first token, sibling", answer.first_token_seconds)
            load = self._load_details("load of the sibling", SIBLING)
            self._note("page-in of the sibling", load["seconds"])
            moved = sum(part["bytes"] for source, part in load["sources"].items() if source != "alias")
            self._evict(SIBLING)
        self.details["sibling_bytes_moved"] = moved
        self._evict(A)

    async def _swaps(self) -> None:
        """`a` and `b` in turns. Answers, frames, and memory stay what they were."""
        expected: dict[str, str] = {}
        held: list[dict[str, float]] = []
        for swap in range(self._scale.swaps):
            name = (A, B)[swap % 2]
            answer = await self._ask(name)
            if expected.setdefault(name, answer.text) != answer.text:
                raise AssertionError(f"{name} answered {answer.text!r} after {swap} swaps, not {expected[name]!r}")
            self._note("first token, swaps", answer.first_token_seconds)
            self._evict(name)
            held.append(self._held())
        self.details["after a tenth of the swaps, and after all"] = [held[len(held) // 10], held[-1]]

    # ---- parts

    async def _ask(self, name: str) -> Answer:
        return await self._client.complete(name, self._prompts[name], FEW)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(3, int(str(self._scale.config["vocab_size"]))) for _ in range(length)]

    def _evict(self, name: str) -> None:
        self._admin.post(f"/admin/models/{name}/evict").raise_for_status()

    def _load_details(self, what: str, name: str) -> dict[str, Any]:
        models = self._admin.get("/admin/models").raise_for_status().json()["models"]
        load: dict[str, Any] = next(model["last_load"] for model in models if model["name"] == name)
        self.details[what] = load
        return load

    def _worker(self) -> dict[str, Any]:
        worker: dict[str, Any] = self._admin.get("/admin/workers").raise_for_status().json()["workers"][0]
        return worker

    def _held(self) -> dict[str, float]:
        beat = self._worker()["heartbeat"]
        gpu = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return {"frames_free": beat["frames_free"], "worker_resident": beat["resident_bytes"], "gpu_free": gpu[0]}

    def _wait_for_tier(self, field: str, wanted: int | None = None) -> None:
        """Until it has so many ready or used slots; by default all."""
        began = time.perf_counter()
        while time.perf_counter() - began < PATIENCE:
            tier = (self._worker()["heartbeat"] or {}).get("tier")
            if tier is not None and tier[field] >= (tier["slots"] if wanted is None else wanted):
                self.details[f"seconds until {tier[field]} slots were {field}"] = round(time.perf_counter() - began, 3)
                return
            time.sleep(0.05)
        raise TimeoutError(f"The host tier does not get on: {tier}")

    def _note(self, name: str, *seconds: float) -> None:
        self.samples.setdefault(name, []).extend(seconds)


def pinned_copy_rate() -> float:
    """Bytes a second from pinned memory to the GPU, one gibibyte at a time."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda", pin_memory=False)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del source, target
    torch.cuda.empty_cache()
    return (1 << 30) / statistics.median(seconds)


def make_images(store: Store, scale: Scale) -> dict[str, Image]:
    def image(name: str, own: int, differing: int) -> Image:
        def seed_of(page: int) -> int:
            return (differing if page % DIFFERING == DIFFERING - 1 else own) * 1_000_000 + page

        return make_image(store, name, scale.config, scale.dtype, seed_of, scale.page)

    return {A: image(A, 1, 1), B: image(B, 2, 2), SIBLING: image(SIBLING, 1, 3)}


def bars(samples: dict[str, list[float]], details: dict[str, Any]) -> list[Bar]:
    def median(name: str) -> float:
        return statistics.median(samples[name])

    share = details["sibling_bytes_moved"] / details["bytes"]
    early, late = details["after a tenth of the swaps, and after all"]
    found = [
        Bar("decode step through the daemon, batch 1", 1e3 * median("step, batch 1"), 6.0, "ms"),
        Bar("decode step through the daemon, batch 32", 1e3 * median("step, batch of many"), 10.0, "ms"),
        Bar(
            "a resident model's p99 between tokens while a neighbour comes in, beside undisturbed",
            p99(samples["interval, while a neighbour comes in"]) / p99(samples["interval, undisturbed"]),
            1.5,
            "ratio",
        ),
        Bar("bytes moved for a sibling that differs in 25 % of its pages", share, ALLOWED_SHARE, "share"),
        Bar(
            "its page-in's time beside a whole model's, over its share of the bytes",
            median("page-in of the sibling") / median("page-in from the host tier") / share,
            PROPORTION,
            "ratio",
        ),
        Bar("frames lost in the swaps", early["frames_free"] - late["frames_free"], 0, "frames"),
        Bar(
            "worker's memory gained in the swaps", (late["worker_resident"] - early["worker_resident"]) / 1e6, 64, "MB"
        ),
        Bar("GPU memory lost in the swaps", (early["gpu_free"] - late["gpu_free"]) / 1e6, 64, "MB"),
    ]
    if "pinned_bytes_per_second" in details:
        limit = 1.15 * details["bytes"] / details["pinned_bytes_per_second"] + 0.05
        first = 1e3 * median("first token, cold in the host tier")
        found.insert(0, Bar("cold in the host tier to the first token, 128-token prompt", first, 1e3 * limit, "ms"))
    return found


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure the whole daemon with models that take turns.")
    arguments.add_argument("--store", type=Path, help="where to make the store; by default a temporary directory")
    arguments.add_argument("--small", action="store_true", help="small models, to try the bench out on any host")
    options = arguments.parse_args()
    scale = SMALL if options.small else FULL
    with tempfile.TemporaryDirectory(dir=options.store) as directory:
        store = Store(Path(directory) / "store")
        began = time.perf_counter()
        images = make_images(store, scale)
        details: dict[str, Any] = {"images_seconds": time.perf_counter() - began}
        if torch.cuda.is_available():
            details["pinned_bytes_per_second"] = pinned_copy_rate()
        config = {"store": str(store.root), "memory": scale.memory, "timeouts": {"request": PATIENCE}}
        began = time.perf_counter()
        with DaemonProcess(Path(directory), config) as daemon:
            details["daemon_start_seconds"] = time.perf_counter() - began
            serving = Serving(scale, daemon, images)
            try:
                uvloop.run(serving.measure())
            except BaseException:
                print("\n".join(list(daemon.output)[-60:]), file=sys.stderr)
                raise
            details |= serving.details | {"worker": serving._worker()}
            samples = serving.samples
    for name, values in samples.items():
        spread = f"p99 {1e3 * p99(values):9.2f} ms" if len(values) > 1 else ""
        print(f"{name:<55} median {1e3 * statistics.median(values):9.2f} ms  {spread}  ({len(values)})")
    for name, detail in details.items():
        print(f"{name}: {detail}")
    if options.small:  # nothing to keep
        return 0
    return report("serving", bars(samples, details), samples, details)


if __name__ == "__main__":
    sys.exit(main())
