"""One worker's memory on one device, without an engine, in a process of its own: for `bench.neighbours`.

    python -m bench.neighbour NAME DIRECTORY DEVICE MODEL

Obeys words on standard input, and answers each line with one line of JSON. `DIRECTORY` has the models (see
`bench/neighbours.py`), and there is a host tier with room for `MODEL`.
"""

from __future__ import annotations

import json
import pickle
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from swapper import libc
from swapper.copier import Copier, HostCopier
from swapper.frames import FramePool
from swapper.granules import identity_of
from swapper.host_frames import HostFramePool
from swapper.host_tier import HostTier
from swapper.pager import PageInResult, Pager
from swapper.peer_frames import HostWindow, OpenWindow
from swapper.peer_protocol import POOL
from swapper.peers import PEERS_DEPTH, PEERS_RUN, RING_FRAMES, Peers
from swapper.pread import PreadReader
from swapper.readers import Reader
from swapper.tier_arena import Arena

PATIENCE = 120.0
SHARDS = "shards.pickle"
CHECKING_THREADS = 8
READ_THREADS = 12
SPARE_FRAMES = 64
LIMIT_PIECES = 256  # pages of one measurement of a limit


class Worker:
    def __init__(self, name: str, directory: Path, device: str, own: str) -> None:
        page_bytes, shards = pickle.loads((directory / SHARDS).read_bytes())
        self.page_bytes: int = page_bytes
        self.own = own
        most = max(shard.page_count(page_bytes) for shard in shards.values())
        self.pool, ring, self.reader, self.make_copier, open_window = _parts(device, most + SPARE_FRAMES, page_bytes)
        self.copier = self.make_copier()
        self.peers = Peers(directory / "peers", name, device, self.pool, ring, self.copier, open_window)
        arena = Arena(f"bench-{name}", shards[own].page_count(page_bytes), page_bytes)
        self.tier = HostTier(arena, self.make_copier(), self.peers)
        self.pager = Pager(self.pool, self.reader, tier=self.tier, peers=self.peers, depth=PEERS_DEPTH, run=PEERS_RUN)
        self.models = {model: self.pager.open(model, shard, directory / model) for model, shard in shards.items()}
        self._pinned = 0

    def obey(self, word: str, *rest: str) -> Any:
        commands: dict[str, Callable[..., Any]] = {
            "in": self.page_in,
            "out": self.page_out,
            "fill": self.fill,
            "meet": self.meet,
            "help": self.take_help,
            "wrong": self.wrong,
            "pinned": self.pinned,
            "across": self.across,
        }
        return commands[word](*rest)

    def page_in(self, model: str) -> dict[str, Any]:
        outcomes: queue.SimpleQueue[PageInResult | Exception] = queue.SimpleQueue()
        begun = time.perf_counter()
        self.pager.page_in(model, 0, self.models[model].page_count, outcomes.put)
        outcome = outcomes.get(timeout=PATIENCE)
        if isinstance(outcome, Exception):
            raise outcome
        return {
            "seconds": time.perf_counter() - begun,
            "sources": {source: its.nbytes for source, its in outcome.sources.items()},
            "stages": dict(outcome.stages),
        }

    def page_out(self, model: str) -> float:
        begun = time.perf_counter()
        self.pager.page_out(model, 0)
        return time.perf_counter() - begun

    def fill(self) -> dict[str, float]:
        """Have the host tier hold this worker's own model."""
        begun = time.perf_counter()
        assert self.tier.wait_settled(PATIENCE)
        ready = time.perf_counter()
        self.page_in(self.own)
        assert self.tier.wait_settled(PATIENCE, self.models[self.own].page_count), self.tier.status
        self.page_out(self.own)
        return {"ready": ready - begun, "filled": time.perf_counter() - ready}

    def take_help(self, wanted: str) -> bool:
        """Whether pages of the host tier may come over neighbours' links."""
        self.tier._peers = self.peers if wanted == "1" else None
        return True

    def meet(self, neighbours: str, staging: str) -> float:
        """Wait until so many neighbours are there, and, if `staging`, can stage for us."""
        begun = time.perf_counter()
        while True:
            links = [link for link in self.peers.links if link.is_usable and (link.can_stage or staging == "0")]
            if len(links) >= int(neighbours):
                return time.perf_counter() - begun
            if time.perf_counter() - begun > PATIENCE:
                raise TimeoutError("The neighbours did not come.")
            time.sleep(0.01)

    def wrong(self, model: str) -> int:
        """How many pages are not in, or have not the hash that they should have."""
        paged = self.models[model]

        def is_right(page: int) -> bool:
            start, nbytes = paged.extent(page)
            return identity_of(self.pool.peek(paged.region.address + start, nbytes)) == paged.hashes[page]

        with ThreadPoolExecutor(CHECKING_THREADS) as threads:
            return paged.page_count - sum(threads.map(is_right, range(paged.resident)))

    # ---- limits

    def pinned(self) -> float:
        """Bytes a second of plain copies from pinned memory to frames, with nothing of ours around them."""
        spare = min(SPARE_FRAMES, 32)
        if not self._pinned:
            nbytes = spare * self.page_bytes
            flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_POPULATE
            self._pinned = libc.mmap(0, nbytes, libc.PROT_READ | libc.PROT_WRITE, flags)
            self.copier.pin(self._pinned, nbytes)
        sources = [self._pinned + piece % spare * self.page_bytes for piece in range(LIMIT_PIECES)]
        return self._rate(
            lambda targets: [
                self.copier.put(source, targets[piece % spare], self.page_bytes) for piece, source in enumerate(sources)
            ],
            spare,
        )

    def across(self) -> float:
        """Bytes a second of plain copies from a neighbour's frames to ours."""
        (link,) = self.peers.links[:1]
        window = link._windows[POOL]
        spare = min(SPARE_FRAMES, 32)
        return self._rate(
            lambda targets: [
                self.copier.across(
                    [
                        (window.address(piece % spare), targets[piece % spare], self.page_bytes)
                        for piece in range(LIMIT_PIECES)
                    ]
                )
            ],
            spare,
        )

    def _rate(self, start: Callable[[list[int]], list[Any]], spare: int) -> float:
        region = self.pool.reserve(spare * self.page_bytes)
        frames = [self.pool.take() for _ in range(spare)]
        self.pool.map(region, 0, *frames)
        targets = [region.address + page * self.page_bytes for page in range(spare)]
        begun = time.perf_counter()
        for copy in start(targets):
            copy.result(PATIENCE)
        seconds = time.perf_counter() - begun
        self.pool.unmap(region, 0, spare)
        self.pool.unreserve(region)
        for frame in frames:
            self.pool.release(frame)
        return LIMIT_PIECES * self.page_bytes / seconds


def _parts(
    device: str, frames: int, page_bytes: int
) -> tuple[FramePool, FramePool, Reader, Callable[[], Copier], OpenWindow]:
    if device == "cpu":
        pool, ring = (HostFramePool(many, page_bytes) for many in (frames, RING_FRAMES))
        return pool, ring, PreadReader(), HostCopier, HostWindow
    from swapper.cuda_copier import CudaCopier
    from swapper.cuda_driver import CudaDevice
    from swapper.cuda_frames import CudaFramePool
    from swapper.cuda_window import CudaWindow
    from swapper.kvikio_reader import KvikioReader

    gpu = CudaDevice()
    ours, rings = (CudaFramePool(gpu, many, page_bytes) for many in (frames, RING_FRAMES))
    reader = KvikioReader(READ_THREADS, device="cuda:0")
    return ours, rings, reader, partial(CudaCopier, gpu), partial(CudaWindow, gpu)


def main() -> None:
    sys.setswitchinterval(0.0005)  # as in a worker
    name, directory, device, own = sys.argv[1:]
    worker = Worker(name, Path(directory), device, own)
    for line in sys.stdin:
        print(json.dumps(worker.obey(*line.split())), flush=True)
    worker.pager.shutdown()
    worker.tier.close()


if __name__ == "__main__":
    main()
