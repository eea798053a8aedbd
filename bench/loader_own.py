"""The physical limits, kvikio alone, and gswapd's pager, in one process that was started for it.

    python -m bench.loader_own TMPFS_FILE DISK_FILE

Prints one JSON object: seconds of each call by what was measured, and what else was learned on the way.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from bench.loader_model import checksum, shard_of
from engine.views import region_bytes, view
from swapper.cuda_copier import CudaCopier
from swapper.cuda_driver import CudaDevice
from swapper.cuda_frames import CudaFramePool
from swapper.frames import Frame, Region
from swapper.geometry import DEFAULT_PAGE_BYTES, GRANULE_BYTES
from swapper.host_tier import HostTier
from swapper.image import Shard
from swapper.kvikio_reader import KvikioReader
from swapper.page_work import Alias, Read
from swapper.pager import PagedShard, PageInResult, Pager
from swapper.tier_arena import Arena
from worker.assembly import GPU_DEPTH, GPU_RUN, kvikio_threads

PATIENCE = 120.0
STEADY_CALLS = 6
RAW_READS = ((16, 8 << 20), (8, 16 << 20), (32, 4 << 20))  # threads, bytes
RAW_SAMPLE = 4 << 30
SIBLING_EVERY = 4  # pages of which one differs


class Own:
    def __init__(self, tmpfs: Path, disk: Path) -> None:
        self.shard = shard_of(tmpfs)
        self.tmpfs, self.disk = tmpfs, disk
        self.device = CudaDevice()
        self.pages = self.shard.page_count(DEFAULT_PAGE_BYTES)
        self.reader = KvikioReader(kvikio_threads(), device="cuda:0")
        self.seconds: dict[str, list[float]] = {}
        self.details: dict[str, Any] = {"bytes": self.shard.nbytes, "kvikio": self.reader.source}

    def measure(self) -> None:
        self.pinned_copy()
        self.kvikio_alone()
        begun = time.perf_counter()
        self.pool = CudaFramePool(self.device, 2 * self.pages, DEFAULT_PAGE_BYTES)
        self.details["frames_seconds"] = time.perf_counter() - begun
        self.page_cache()
        self.host_tier()
        self.cold_disk()

    # ---- limits

    def pinned_copy(self) -> None:
        """One copy of a quarter of the model at a time, from memory that stays."""
        nbytes = self.shard.nbytes // 4
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        for _ in range(STEADY_CALLS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            self.note("pinned copy", 4 * (time.perf_counter() - begun))

    def kvikio_alone(self) -> None:
        import kvikio

        flat = torch.empty(self.shard.nbytes, dtype=torch.uint8, device="cuda")
        self.reader.read_directly(False)
        file = kvikio.CuFile(self.tmpfs, "r")
        for _ in range(STEADY_CALLS):
            begun = time.perf_counter()
            file.pread(flat, self.shard.nbytes, self.shard.data_start).get()
            self.note("kvikio alone", time.perf_counter() - begun)
        file.close()
        del flat
        torch.cuda.empty_cache()

    def raw_reads(self, threads: int, piece: int, nbytes: int) -> float:
        """Seconds of reading the file's data with O_DIRECT into memory that stays, past everything of ours."""
        fd = os.open(self.disk, os.O_RDONLY | os.O_DIRECT)
        buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(threads):
            buffer = mmap.mmap(-1, piece)
            buffer.write(bytes(piece))
            buffers.put(buffer)

        def read(offset: int) -> None:
            buffer = buffers.get()
            os.preadv(fd, [buffer], self.shard.data_start + offset)
            buffers.put(buffer)

        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(read, range(0, nbytes, piece)))
        seconds = time.perf_counter() - begun
        os.close(fd)
        return seconds

    # ---- gswapd

    def page_cache(self) -> None:
        pager = Pager(self.pool, self.reader, depth=GPU_DEPTH, run=GPU_RUN)
        paged = pager.open("model", self.shard, self.tmpfs)
        for call in range(STEADY_CALLS + 1):
            self.swap("gswapd, page cache", pager, paged, check=call == 0)
        pager.shutdown()

    def host_tier(self) -> None:
        begun = time.perf_counter()
        tier = HostTier(Arena("bench", self.pages + 64, DEFAULT_PAGE_BYTES), CudaCopier(self.device))
        tier.wait_settled(PATIENCE)
        self.details["tier_ready_seconds"] = time.perf_counter() - begun
        pager = Pager(self.pool, self.reader, tier=tier, depth=GPU_DEPTH, run=GPU_RUN)
        paged = pager.open("model", self.shard, self.tmpfs)
        self.page_in(pager, paged)
        begun = time.perf_counter()
        if not tier.wait_settled(PATIENCE, self.pages):
            raise TimeoutError(f"The host tier did not fill: {tier.status}")
        self.details["tier_filled_behind_seconds"] = time.perf_counter() - begun
        pager.page_out("model", 0)
        for call in range(STEADY_CALLS + 1):
            self.swap("gswapd, host tier", pager, paged, check=call == 0)
        self.time_line(pager, paged)
        self.sibling(pager, paged)
        pager.shutdown()
        tier.close()

    def time_line(self, pager: Pager, paged: PagedShard) -> None:
        """When each page was mapped and when it was there, and how long the link waited for a page to be mapped."""
        mapped, there = [0.0] * self.pages, [0.0] * self.pages
        map_pages, arrived = self.pool.map, pager._reads._arrived

        def noted_map(region: Region, page: int, *frames: Frame) -> None:
            map_pages(region, page, *frames)
            mapped[page : page + len(frames)] = [time.perf_counter()] * len(frames)

        def noted_arrival(works: Sequence[Alias | Read], source: str, stages: Mapping[str, float]) -> None:
            for work in works:
                there[work.task.page] = time.perf_counter()
            arrived(works, source, stages)

        self.pool.map, pager._reads._arrived = noted_map, noted_arrival  # type: ignore[method-assign]
        begun = time.perf_counter()
        self.page_in(pager, paged)
        self.pool.map, pager._reads._arrived = map_pages, arrived  # type: ignore[method-assign]
        pager.page_out(paged.model, 0)
        waits = [max(0.0, its - before) for its, before in zip(mapped[1:], there, strict=False)]
        self.details["time line, host tier, ms"] = {
            "mapped": [round(1e3 * (when - begun), 2) for when in mapped],
            "there": [round(1e3 * (when - begun), 2) for when in there],
        }
        self.details["share of the time that the link waited for a mapping"] = sum(waits) / (there[-1] - begun)

    def sibling(self, pager: Pager, paged: PagedShard) -> None:
        """A model that differs from a resident one in every fourth page. Only those pages of its file are there."""
        pages = range(SIBLING_EVERY - 1, self.pages, SIBLING_EVERY)
        step = DEFAULT_PAGE_BYTES // GRANULE_BYTES
        granules = list(self.shard.granules)
        path = self.tmpfs.with_name("sibling.safetensors")
        with self.tmpfs.open("rb") as model, path.open("wb") as file:
            file.truncate(self.shard.data_start + self.shard.nbytes)
            for page in pages:
                start, nbytes = paged.extent(page)
                model.seek(self.shard.data_start + start)
                data = bytearray(model.read(nbytes))
                data[:8] = page.to_bytes(8, "little")
                file.seek(self.shard.data_start + start)
                file.write(data)
                granules[page * step] = blake3(data[:GRANULE_BYTES]).hexdigest()
        shard = Shard(0, path.name, self.shard.data_start, self.shard.nbytes, tuple(granules), (), ())
        self.page_in(pager, paged)
        its = pager.open("sibling", shard, path)
        result = self.swap("gswapd, sibling in 25 % of pages", pager, its)
        self.details["sibling_sources"] = _sources(result)
        self.swap("gswapd, sibling in 25 % of pages", pager, its)
        path.unlink()

    def cold_disk(self) -> None:
        """Raw reads and page-ins in turns: a virtual disk's speed drifts."""
        best = min(RAW_READS, key=lambda shape: self.raw_reads(*shape, RAW_SAMPLE))
        self.details["raw_read"] = {"threads": best[0], "bytes": best[1]}
        pager = Pager(self.pool, self.reader, depth=GPU_DEPTH, run=GPU_RUN)
        paged = pager.open("model", self.shard, self.disk)
        for _ in range(2):
            self.note("raw O_DIRECT read", self.raw_reads(*best, self.shard.nbytes))
            self.swap("gswapd, cold disk", pager, paged)
        pager.shutdown()

    # ---- parts

    def page_in(self, pager: Pager, paged: PagedShard) -> PageInResult:
        outcomes: queue.SimpleQueue[PageInResult | Exception] = queue.SimpleQueue()
        pager.page_in(paged.model, 0, paged.page_count, outcomes.put)
        outcome = outcomes.get(timeout=PATIENCE)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def swap(self, name: str, pager: Pager, paged: PagedShard, *, check: bool = False) -> PageInResult:
        begun = time.perf_counter()
        result = self.page_in(pager, paged)
        self.note(name, time.perf_counter() - begun)
        self.details[f"stages of {name}"] = {stage: round(its, 4) for stage, its in result.stages.items()}
        self.details[f"sources of {name}"] = _sources(result)
        if check:
            data = region_bytes(paged.region)
            tensors = {
                entry.name: view(data, entry.offset, torch.bfloat16, entry.shape) for entry in self.shard.tensors
            }
            self.details[f"checksum of {name}"] = checksum(tensors)
            torch.cuda.empty_cache()
        begun = time.perf_counter()
        pager.page_out(paged.model, 0)
        self.note(f"page-out after {name}", time.perf_counter() - begun)
        return result

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)


def _sources(result: PageInResult) -> dict[str, int]:
    return {source: its.nbytes for source, its in result.sources.items()}


def main() -> None:
    sys.setswitchinterval(0.0005)  # as in a worker
    own = Own(Path(sys.argv[1]), Path(sys.argv[2]))
    own.measure()
    print(json.dumps({"seconds": own.seconds, "details": own.details}))


if __name__ == "__main__":
    main()
