"""The demo: SmolLM2 and two siblings answer in turn from memory that holds two of the three.

Everything is real: the store and the packer, the daemon as a process with its Ray worker, the official OpenAI client.
"""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from server.cli.remote import human_bytes
from server.cli.store import progress_bar
from server.demo.checkpoints import SCALE, siblings, smollm2
from server.demo.daemon import DaemonProcess
from swapper.geometry import GRANULE_BYTES, kv_frames
from swapper.image import Image
from swapper.store import Store
from worker.add import add_model

PAGE_BYTES = GRANULE_BYTES  # small pages: these models are small
KV_TOKENS = 1024
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "What do bees make?",
)


def add_models(store: Store, scratch: Path) -> dict[str, Image]:
    """SmolLM2 and its siblings, packed into the store; `scratch` takes the siblings' checkpoints."""
    images = {}
    for name, checkpoint in {"smollm2": smollm2(), **siblings(scratch)}.items():
        with progress_bar(f"packing {name}") as progress:
            images[name] = add_model(store, checkpoint, name, progress=progress)
    return images


def pool_frames(images: dict[str, Image]) -> tuple[int, int, int]:
    """(frames of the pool, frames for KV among them, distinct pages of all images): two thirds of the pages fit."""
    distinct = {page for image in images.values() for page in image.manifest.shards[0].page_hashes(PAGE_BYTES)}
    per_token = max(image.manifest.kv_bytes_per_token for image in images.values())
    kv = kv_frames(KV_TOKENS, per_token, PAGE_BYTES)
    return len(distinct) * 2 // 3 + kv, kv, len(distinct)


SHOWN_METRICS = ("gswapd_swap_in_bytes_total", "gswapd_swap_in_seconds_sum", "gswapd_swap_in_seconds_count",
    "gswapd_swap_outs_total", "gswapd_swap_out_seconds_sum", "gswapd_swap_out_seconds_count", "gswapd_frames{",
    "gswapd_model_resident_pages")  # fmt: skip


def metric_lines(text: str, prefixes: tuple[str, ...]) -> list[str]:
    """The samples of a metrics page, other than 0, whose names begin with one of `prefixes`."""
    return [line for line in text.splitlines() if line.startswith(prefixes) and not line.endswith(" 0.0")]


class Loads:
    """Every page-in of the demo, read from the admin endpoint after each answer."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._seen: dict[str, float] = {}
        self.table = Table(
            "model", "pages", "bytes read", "bytes aliased", "seconds", "source", title="page-ins", box=None
        )

    def look(self) -> dict[str, Any] | None:
        """Note the load that a request has caused, if it caused one, and return it."""
        for model in self._daemon.admin():
            load: dict[str, Any] | None = model["last_load"]
            if load is None or self._seen.get(model["name"]) == load["at"]:
                continue
            self._seen[model["name"]] = load["at"]
            read = Counter({name: part["bytes"] for name, part in load["sources"].items()})
            aliased = read.pop("alias", 0)
            self.table.add_row(
                model["name"], str(load["pages"]), human_bytes(read.total()), human_bytes(aliased),
                f"{load['seconds']:.3f}", ", ".join(read) or "alias",
            )  # fmt: skip
            return load
        return None


class Demo:
    """One run against a daemon: what is printed, and what went wrong."""

    def __init__(self, daemon: DaemonProcess, console: Console) -> None:
        self._daemon = daemon
        self._console = console
        self._loads = Loads(daemon)
        self.problems: list[str] = []

    def ask(self, names: Iterable[str]) -> None:
        """Every question to every model, in turn."""
        from openai import OpenAI

        client = OpenAI(base_url=f"{self._daemon.url}/v1", api_key="none", max_retries=0, timeout=120)
        for question, name in product(QUESTIONS, names):
            reply = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=48
            )
            text = (reply.choices[0].message.content or "").strip()
            load = self._loads.look()
            swap = f"paged in {load['pages']} pages in {load['seconds']:.3f} s" if load else "was resident"
            self._console.print(f"[bold]{name}[/bold] ({swap})\n  {question}\n  → {text}", highlight=False)
            if not text:
                self.problems.append(f"{name} gave no answer to {question!r}")
        self._console.print()
        self._console.print(self._loads.table)

    def show_metrics(self) -> None:
        metrics = httpx.get(f"{self._daemon.url}/metrics", timeout=10).text
        self._console.print("\nfrom /metrics:")
        self._console.print("  " + "\n  ".join(metric_lines(metrics, SHOWN_METRICS)), highlight=False, markup=False)
        outs = metric_lines(metrics, ("gswapd_swap_outs_total",))
        if not any(float(line.rsplit(" ", 1)[1]) > 0 for line in outs):
            self.problems.append("nothing was ever paged out")

    def keep(self) -> None:
        self._console.print(f"\nserving at {self._daemon.url} until Ctrl-C")
        try:
            signal.pause()
        except KeyboardInterrupt:
            self._console.print()

    def stop(self) -> None:
        status = self._daemon.stop()
        if status:
            self.problems.append(f"the daemon ended with exit status {status}")


def run_demo(*, keep: bool = False) -> int:
    """Run the demo and print it; the exit status: 0 if every answer came and pages went both ways."""
    console = Console()
    with console.status("converting SmolLM2-135M-Instruct (once; kept in the cache directory)"):
        smollm2()
    with tempfile.TemporaryDirectory(prefix="gswapd-demo-") as directory:
        scratch = Path(directory)
        images = add_models(Store(scratch / "store"), scratch)
        frames, kv, distinct = pool_frames(images)
        console.print(
            "Three models: SmolLM2-135M-Instruct, and two siblings made from it by scaling all matrices of twelve of "
            f"its thirty layers by {SCALE}: they answer slightly differently and share the pages of the other layers.\n"
            f"{distinct} distinct pages of {human_bytes(PAGE_BYTES)} in all; "
            f"the pool holds {frames - kv} of them, and {kv} frames for KV caches."
        )
        config = {
            "store": str(scratch / "store"),
            "memory": {"pool": frames * PAGE_BYTES, "page": PAGE_BYTES},
        }
        console.print("starting the daemon …")
        with DaemonProcess(scratch, config) as daemon:
            console.print(f"daemon ready at {daemon.url}\n")
            demo = Demo(daemon, console)
            demo.ask(images)
            demo.show_metrics()
            if keep:
                demo.keep()
            demo.stop()
    for problem in demo.problems:
        console.print(f"[red]{problem}[/red]")
    if not demo.problems:
        console.print("\nAll answered; the daemon is stopped.")
    return 1 if demo.problems else 0
