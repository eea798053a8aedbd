"""A worker's memory without its engine: a pager with a host tier and neighbours, here or in a process of its own.

    python -m tests.swapper.stations NAME DIRECTORY FRAMES DEVICE

obeys lines of standard input, and answers each with one line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from swapper.copier import Copier, HostCopier
from swapper.frames import FramePool
from swapper.host_frames import HostFramePool
from swapper.host_tier import HostTier
from swapper.pager import PagedShard, Pager
from swapper.peer_frames import HostWindow, OpenWindow
from swapper.peer_link import PeerLink
from swapper.peers import RING_FRAMES, Peers
from swapper.pread import PreadReader
from swapper.readers import Reader
from swapper.tier_arena import Arena
from tests.swapper.gpu import open_device
from tests.swapper.paging import PAGE, PATIENCE, page_in, write_shard
from tests.swapper.tiers import new_name

ROOT = Path(__file__).parents[2]
STORAGE = dict.fromkeys(("page_cache", "disk", "gds", "posix"), "storage")


class Parts:
    """What depends on the device: host memory, or the first GPU that the process sees."""

    def __init__(self, device: str, frames: int) -> None:
        self.pool: FramePool
        self.ring: FramePool
        self.make_copier: Callable[[], Copier]
        self.open_window: OpenWindow
        self.reader: Reader
        if device == "cpu":
            self.pool, self.ring = (HostFramePool(many, PAGE) for many in (frames, RING_FRAMES))
            self.make_copier = partial(HostCopier, 2)
            self.open_window = HostWindow
            self.reader = PreadReader(2)
        else:
            from swapper.cuda_copier import CudaCopier
            from swapper.cuda_frames import CudaFramePool
            from swapper.cuda_window import CudaWindow
            from swapper.kvikio_reader import KvikioReader

            gpu = open_device()
            self.pool, self.ring = (CudaFramePool(gpu, many, PAGE) for many in (frames, RING_FRAMES))
            self.make_copier = partial(CudaCopier, gpu)
            self.open_window = partial(CudaWindow, gpu)
            self.reader = KvikioReader(4, device="cuda:0", waiters=4)


class Station:
    """Everything of one worker but its engine."""

    def __init__(self, name: str, directory: Path, frames: int, device: str = "cpu", tier_slots: int = 0) -> None:
        self.directory = directory
        self.device = device
        parts = Parts(device, frames)
        self.pool, self.ring, self.reader = parts.pool, parts.ring, parts.reader
        self.copier = parts.make_copier()
        self.peers = Peers(directory / "peers", name, device, self.pool, self.ring, self.copier, parts.open_window)
        self.tier = None
        if tier_slots:
            # In shared memory proper: a driver pins no pages of another file system's.
            self.tier = HostTier(Arena(new_name(), tier_slots, PAGE), parts.make_copier(), self.peers)
            assert self.tier.wait_settled(PATIENCE)
        self.pager = Pager(self.pool, self.reader, tier=self.tier, peers=self.peers)

    def __enter__(self) -> Station:
        return self

    def __exit__(self, *_: object) -> None:
        self.pager.shutdown()
        self.reader.close()
        if self.tier is not None:
            self.tier.close()
        self.copier.close()
        assert self.pool.free == self.pool.frames, "every frame came back"
        assert self.ring.free == self.ring.frames
        self.pool.close()
        self.ring.close()

    def know(self, model: str, tags: Sequence[int], tail: int = PAGE) -> PagedShard:
        """Open a shard of these pages."""
        path = self.directory / f"{model}.safetensors"
        return self.pager.open(model, write_shard(path, tags, tail), path)

    def bring_in(self, shard: PagedShard) -> dict[str, int]:
        """Page all of it in; returns how many pages came from where."""
        result = page_in(self.pager, shard.model, 0, shard.page_count)
        pages = {STORAGE.get(source, source): its.pages for source, its in result.sources.items()}
        return dict(sorted(pages.items()))

    def bytes_of(self, shard: PagedShard) -> bytes:
        """All that is in of it."""
        nbytes = min(shard.resident * PAGE, shard.shard.nbytes)
        starts = range(0, nbytes, PAGE)
        return b"".join(
            bytes(self.pool.peek(shard.region.address + start, min(PAGE, nbytes - start))) for start in starts
        )

    def link(self, name: str) -> PeerLink | None:
        return next((link for link in self.peers.links if link.name == name), None)

    def meet(self, name: str, staging: bool = False) -> PeerLink:
        """Wait until a neighbour is there; with `staging`, until it can stage from the host tier."""

        def met() -> bool:
            link = self.link(name)
            return link is not None and link.is_usable and (link.can_stage or not staging)

        until(met)
        link = self.link(name)
        assert link is not None
        return link


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Neighbour:
    """A station in another process."""

    def __init__(self, name: str, directory: Path, frames: int, device: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.swapper.stations", name, str(directory), str(frames), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},  # a worker sees one GPU, as Ray has it
        )

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, *words: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        assert answer, "the neighbour is dead"
        return answer

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)


def main(name: str, directory: Path, frames: int, device: str) -> None:
    """Obey `in MODEL TAG…`, `out MODEL`, `meet NAME`."""
    with Station(name, directory, frames, device) as station:
        shards: dict[str, PagedShard] = {}
        for line in sys.stdin:
            match line.split():
                case ["in", model, *tags]:
                    shards[model] = station.know(f"{name}-{model}", [int(tag) for tag in tags])
                    print(station.bring_in(shards[model]), flush=True)
                case ["out", model]:
                    print(station.pager.page_out(shards[model].model, 0), flush=True)
                case ["meet", other]:
                    print(station.meet(other).name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
