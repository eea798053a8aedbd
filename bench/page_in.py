"""How fast a model is paged in from the page cache, and out again.

    python -m bench.page_in

Swaps SmolLM2 (269 MB) in through the pager, beside a plain multi-threaded `preadv` of the same bytes into fresh
memory, round by round in one run, and compares medians. Both use as many threads and read pieces of one page.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.report import Bar, report
from server.demo.checkpoints import smollm2
from swapper import libc
from swapper.geometry import GRANULE_BYTES
from swapper.host_frames import HostFramePool
from swapper.image import Image
from swapper.pager import PageInResult, Pager
from swapper.pread import PreadReader
from swapper.store import Store
from worker.add import add_model

PATIENCE = 60.0


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure paging in and out from the page cache.")
    arguments.add_argument("--rounds", type=int, default=21)
    arguments.add_argument("--threads", type=int, default=4)
    arguments.add_argument("--page-mib", type=int, default=GRANULE_BYTES >> 20)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        image = add_model(Store(Path(directory)), smollm2(), "smollm2")
        return measure(image, options.rounds, options.threads, options.page_mib << 20)


def measure(image: Image, rounds: int, threads: int, page_bytes: int) -> int:
    shard, path = image.manifest.shards[0], image.shard_path(0)
    path.read_bytes()  # into the page cache
    page_count = shard.page_count(page_bytes)
    pool = HostFramePool(page_count, page_bytes)
    reader = PreadReader(threads)
    pager = Pager(pool, reader)
    paged = pager.open("model", shard, path)
    plain: list[float] = []
    page_in: list[float] = []
    page_out: list[float] = []
    sources: set[str] = set()
    for _ in range(rounds + 1):
        plain.append(plain_read(path, shard.data_start, shard.nbytes, threads, page_bytes))
        begun = time.perf_counter()
        result = swap_in(pager, page_count)
        page_in.append(time.perf_counter() - begun)
        sources.update(result.sources)
        begun = time.perf_counter()
        pager.page_out("model", 0)
        page_out.append(time.perf_counter() - begun)
    assert paged.resident == 0
    pager.shutdown()
    reader.close()
    pool.close()
    first_use = page_in.pop(0)  # the kernel clears each frame when it is first mapped
    del plain[0], page_out[0]
    return report(
        "page_in",
        [
            Bar(
                "page-in from the page cache, beside plain preadv into fresh memory",
                statistics.median(page_in) / statistics.median(plain),
                1.5,
                "ratio",
            ),
            Bar("page-out of the whole model", statistics.median(page_out) * 1e3, 20.0, "ms"),
        ],
        {"plain_seconds": plain, "page_in_seconds": page_in, "page_out_seconds": page_out},
        {
            "bytes": shard.nbytes,
            "page_bytes": page_bytes,
            "threads": threads,
            "sources": sorted(sources),
            "first_use_of_frames_seconds": round(first_use, 6),
        },
    )


def swap_in(pager: Pager, page_count: int) -> PageInResult:
    outcomes: queue.SimpleQueue[PageInResult | Exception] = queue.SimpleQueue()
    pager.page_in("model", 0, page_count, outcomes.put)
    outcome = outcomes.get(timeout=PATIENCE)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def plain_read(path: Path, start: int, nbytes: int, threads: int, piece: int) -> float:
    """Seconds that reading a file's bytes into fresh memory takes, without any of the pager."""
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(0, nbytes, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS)

    def read(offset: int) -> None:
        length = min(piece, nbytes - offset)
        if os.preadv(fd, [libc.view(address + offset, length)], start + offset) != length:
            raise OSError(f"short read at {start + offset}")

    with ThreadPoolExecutor(threads) as executor:
        begun = time.perf_counter()
        for future in [executor.submit(read, offset) for offset in range(0, nbytes, piece)]:
            future.result()
        seconds = time.perf_counter() - begun
    libc.munmap(address, nbytes)
    os.close(fd)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
